"""Element types and artifacts."""

import ml_dtypes
import numpy as np
import pytest
from epdsl_runtime.artifact import Artifact, Param, Site, site_tag
from epdsl_runtime.dtypes import decode_word, dtype_name, element, numpy_dtype

NAMES = {
    "i1": (np.bool_, 1),
    "i8": (np.int8, 1),
    "i16": (np.int16, 2),
    "i32": (np.int32, 4),
    "i64": (np.int64, 8),
    "u8": (np.uint8, 1),
    "u16": (np.uint16, 2),
    "u32": (np.uint32, 4),
    "u64": (np.uint64, 8),
    "f16": (np.float16, 2),
    "bf16": (ml_dtypes.bfloat16, 2),
    "f32": (np.float32, 4),
    "f64": (np.float64, 8),
    "f8e4m3": (ml_dtypes.float8_e4m3fn, 1),
    "f8e5m2": (ml_dtypes.float8_e5m2, 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_and_its_numpy_dtype(name):
    dtype, nbytes = NAMES[name]
    assert numpy_dtype(name) == np.dtype(dtype)
    assert dtype_name(dtype) == name
    assert (element(name).nbytes, element(dtype).name, element(np.dtype(dtype)).name) == (nbytes, name, name)


class Language:
    name = "f32"
    nbytes = 4


class Mailbox:
    name = "Mailbox"
    nbytes = 24


def test_types_of_the_language_are_read_by_their_name():
    assert element(Language).name == "f32"
    assert (element(Mailbox).name, element(Mailbox).nbytes, element(Mailbox).numpy) == ("Mailbox", 24, None)


@pytest.mark.parametrize("spec", ["float", "complex64", np.complex64, object(), np.dtype(">i4"), None])
def test_unknown_element_types_are_refused(spec):
    with pytest.raises(TypeError, match="element"):
        element(spec)


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        (0xFFFF_FFFF_FFFF_FFFE, "i32", -2),
        (0xFFFF_FFFF_FFFF_FFFE, "u32", 0xFFFF_FFFE),
        (0x1_0000_0001, "i1", True),
        (0x3FF8_0000_0000_0000, "bf16", 1.5),
        (0xBFF8_0000_0000_0000, "f32", -1.5),
        (0xFFFF_FFFF_FFFF_FF80, "i8", -128),
        (0x7FFF_0000_1234, "Ptr[f32]", 0x7FFF_0000_1234),
        (0x3FF8_0000_0000_0000, "f64", 1.5),
        (0x8000_0000_0000_0000, "i64", -(2**63)),
    ],
)
def test_words_are_decoded(word, name, value):
    assert decode_word(word, name) == value


def artifact(**changes) -> Artifact:
    values = {
        "name": "put",
        "target": "sm_90",
        "vendor": "nvidia",
        "warp_size": 32,
        "params": (
            Param("src", "pointer", "bf16", 2, 16),
            Param("box", "struct", "Box", fields=(Param("slot", "pointer", "u32", 4, 4, True), Param("n", "scalar", "i32", 4))),
            Param("dst", "peers", "f32", 4, 4, True),
            Param("many", "array", "i32", fields=(Param("", "scalar", "i32", 4),), count=2),
        ),
        "shared_bytes": 128,
        "sites": (Site("wait", "a.py", 7, 3, "put", "v == 1", ("u32",)),),
        "binary": b"\x00PTX\xff",
        "max_threads": 256,
        "texts": {"ptx": "text", "ep": "module"},
        "constants": {"n": "4"},
    }
    return Artifact(**{**values, **changes})


def test_an_artifact_survives_a_round_trip(tmp_path):
    made = artifact()
    read = Artifact.load(made.save(tmp_path / "deep" / "er"))
    assert read == made
    assert read.site_tag == made.site_tag
    assert [(s.name, s.dtype, s.nbytes) for s in read.slots] == [
        ("src", "u64", 8),
        ("box.slot", "u64", 8),
        ("box.n", "i32", 4),
        ("dst.table", "u64", 8),
        ("dst.size", "i32", 4),
        ("many[0]", "i32", 4),
        ("many[1]", "i32", 4),
    ]


def test_the_site_tag_is_31_bits_and_depends_on_what_it_is_made_of():
    tag = site_tag("put", "sm_90", {"n": "4", "m": "2"})
    assert tag == site_tag("put", "sm_90", {"m": "2", "n": "4"}) == artifact(constants={"n": "4", "m": "2"}).site_tag
    assert 0 <= tag < 1 << 31
    others = {site_tag("get", "sm_90", {"n": "4"}), site_tag("put", "sm_80", {"n": "4"}), site_tag("put", "sm_90", {"n": "5"})}
    assert len({tag, *others}) == 4
    # Kernels on disk hold the number.
    assert site_tag("put", "sm_90", {}) == 0x20B884F4
