"""`epdsl report`: which line comes from which, and the page in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from epdsl.cli import app
from epdsl.report import lines

HERE = Path(__file__).parent
KERNEL = HERE / "dump_kernel.py"
BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="no browser here: apt-get install chromium")


def line_of(text: str) -> int:
    """The number of the kernel's line that has a text."""
    return next(number for number, line in enumerate(KERNEL.read_text().splitlines(), 1) if text in line)


CALL, MULTIPLY, STORE = line_of("scaled(data[i]"), line_of("x * by"), line_of("ep.RELEASE")

# ---- which line comes from which


def test_mlir_locations_leave_the_text() -> None:
    text = (
        'func @k(%a: i32 loc("x.py":1:1), %b: i32 loc("x"("x.py":1:1))) {\n'
        '  %y = f %a : i32 loc("y"(callsite("h.py":8:9 at "x.py":16:19)))\n'
        '  %z = g() {s = "a ) b"} : i32 loc(fused<#d<id = distinct[0]<>, file = <"x.py" in "/w">>>["x.py":4:2])\n'
        '  h() : () -> () loc("-":3:4)\n'
    )
    assert lines.mlir(text) == [
        lines.Line("func @k(%a: i32, %b: i32) {", (("x.py", 1),)),
        lines.Line("  %y = f %a : i32", (("h.py", 8), ("x.py", 16))),
        lines.Line('  %z = g() {s = "a ) b"} : i32', (("x.py", 4),)),
        lines.Line("  h() : () -> ()"),
    ]


LLVM = """define void @k() !dbg !3 {
  %1 = fmul float %0, 2.0, !dbg !10
  call void @b(), !dbg !13
  ret void
}
!3 = distinct !DISubprogram(name: "k", scope: !4, file: !4, line: 13, unit: !0)
!4 = !DIFile(filename: "x.py", directory: "/w")
!5 = !DIFile(filename: "-", directory: "")
!10 = !DILocation(line: 8, column: 9, scope: !11, inlinedAt: !12)
!11 = distinct !DILexicalBlockFile(scope: !3, file: !4, discriminator: 0)
!12 = !DILocation(line: 16, column: 19, scope: !3)
!13 = !DILocation(line: 231, column: 3, scope: !14, inlinedAt: !15)
!14 = distinct !DISubprogram(name: "helper", scope: !5, file: !5, line: 228, unit: !0)
!15 = distinct !DILocation(line: 17, column: 5, scope: !3)
"""
CHAINS = {("/w/x.py", 8): (("/w/x.py", 16),), ("-", 231): (("/w/x.py", 17),)}


def test_llvm_debug_metadata() -> None:
    found = lines.llvm(LLVM)
    assert [line.places for line in found[:5]] == [
        (("/w/x.py", 13),),
        (("/w/x.py", 8), ("/w/x.py", 16)),
        (("/w/x.py", 17),),
        (),
        (),
    ]
    assert all(not line.places for line in found[5:])
    assert lines.chains(LLVM) == CHAINS


@pytest.mark.parametrize("file", ['\t.file\t1 "/w/x.py"', '\t.file\t1 "/w" "x.py"'])
def test_assembly(file: str) -> None:
    text = f"{file}\nk:\n\t.loc\t1 8 9\n\tadd r0;\n$L1:\n\tadd r1;\n\t// note\n\t.loc\t1 0 9\n\tmov r2;\n\t.loc 2 231 3\n\tbar;\n}}\n"
    text += '\tafter;\n\t.file\t2 "-"\n'
    places = [line.places for line in lines.assembly(text, CHAINS)]
    helper = (("/w/x.py", 8), ("/w/x.py", 16))
    assert places == [(), (), helper, helper, (), helper, (), (), (), (("/w/x.py", 17),), (("/w/x.py", 17),), (), (), ()]


def test_disassembly() -> None:
    nvidia = (
        '\t//## File "/w/x.py", line 8\n        /*00*/ FADD ;\n.L:\n'
        '\t//## File "/w/h.py", line 1 inlined at "/w/x.py", line 2\n        /*10*/ EXIT ;\n'
    )
    assert [line.places for line in lines.disassembly(nvidia, CHAINS)] == [
        (("/w/x.py", 8), ("/w/x.py", 16)),
        (("/w/x.py", 8), ("/w/x.py", 16)),
        (),
        (("/w/h.py", 1), ("/w/x.py", 2)),
        (("/w/h.py", 1), ("/w/x.py", 2)),
    ]
    assert [line.places for line in lines.disassembly("; /w/x.py:17\n\ts_barrier\n", {})] == [(("/w/x.py", 17),)] * 2


# ---- the page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("report") / "report.html"
    result = CliRunner().invoke(app, ["report", f"{KERNEL}:publish", "--targets", "sm_90,gfx942", "-o", str(output), "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["stages"]["gfx942"][-1] in ("asm", "sass")
    return output


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_what_comes_from_a_line_is_known_at_every_stage(page: Path) -> None:
    data = data_of(page)
    multiply = {"ep": "mulf", "llvm": "fmul", "llvm-opt": "fmul|fadd", "asm": "add.rn.f32|v_add_f32"}
    store = {"ep": "ep.store", "llvm": "st.release|store", "llvm-opt": "st.release|store", "asm": "st.release.sys|global_store"}
    for target in data["targets"]:
        stages = {stage["name"]: stage["lines"] for stage in target["stages"]}
        assert all(name in stages for name in multiply)
        for name, rows in stages.items():
            for line, wanted in ((MULTIPLY, multiply.get(name)), (STORE, store.get(name))):
                of_line = [text for text, *keys in rows if keys and keys[0].endswith(f":{line}")]
                assert of_line, (target["name"], name, line)
                assert wanted is None or any(re.search(wanted, text) for text in of_line), (target["name"], name)
            # The multiplication is also what the call became.
            assert any(keys[1:] and keys[1].endswith(f":{CALL}") for _, *keys in rows), (target["name"], name)
    assert data["targets"][1]["resources"]["vector registers"].isdecimal()
    assert [row[1] for row in data["sources"][0]["lines"]][:2] == ["@ep.func", "def scaled(x: ep.f32, by: ep.f32) -> ep.f32:"]


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"https?://|src=|href=|@import|url\(|fetch\(|XMLHttp|import\(", text.partition('id="data"')[0])
    assert "default-src 'none'" in text


def test_text_of_a_kernel_cannot_end_the_page(tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text('import epdsl as ep\n\n@ep.kernel\ndef k(p: ep.Ptr[ep.i32]):\n    """</script><!--<script>"""\n    p[0] = 1\n')
    output = tmp_path / "r.html"
    assert CliRunner().invoke(app, ["report", f"{path}:k", "--targets", "sm_90", "-o", str(output)]).exit_code == 0
    assert data_of(output)["sources"][0]["lines"][2][1] == '    """</script><!--<script>"""'
    assert output.read_text().count("<!--") == 0


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        ([f"{KERNEL}:publish", "--targets", "sm_1"], 2, "unknown target 'sm_1'"),
        ([f"{KERNEL}:publish", "--targets", ","], 2, "report needs --targets"),
        ([f"{KERNEL}:nothing"], 2, "its kernels are publish, sized"),
        ([f"{KERNEL}:sized"], 1, "constants missing ['n']"),
    ],
)
def test_what_report_refuses(args: list[str], status: int, text: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", *args, "-o", str(tmp_path / "r.html")])
    assert result.exit_code == status and text in result.stderr
    assert not (tmp_path / "r.html").exists()


# ---- in a browser


def chromium(*args: str) -> str:
    """Runs the browser without a window; its standard output."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


DRIVER = """
const told = {};
const on = (pane) => rows[pane].filter((r) => r.node.classList.contains("on")).map((r) => r.text.trim());
const via = (pane) => rows[pane].filter((r) => r.node.classList.contains("via")).map((r) => r.text.trim());
const press = (key, target = document.body) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const click = (pane, text) => rows[pane].find((r) => r.text.includes(text)).node.querySelector(".text").click();
const stageOf = (pane) => panes[pane].closest("section").querySelector(".stage").value;
const targetOf = (pane) => panes[pane].closest("section").querySelector(".target").value;
told.start = [1, 2].map((pane) => [targetOf(pane), stageOf(pane)]);
click(0, "scaled(data[i]");
told.fromSource = [on(0), on(1), on(2)];
told.scrolled = panes[2].scrollTop > 0;
told.hash = location.hash;
click(1, "add.rn.f32");
told.fromAssembly = [on(0), via(0), on(2)];
press("Escape");
told.cleared = [on(0), on(1), on(2)];
press("h"); press("h"); press("j"); press("j"); press("j");
told.third = on(0);
press("k");
told.second = on(0).concat(rows[0][at[0]].text.trim());
press("l"); press("[");
told.before = stageOf(1);
press("t");
told.target = targetOf(1);
press("]");
told.after = stageOf(1);
const search = document.getElementById("search");
press("/");
told.focused = document.activeElement.id;
search.value = "RELEASE";
search.dispatchEvent(new Event("input"));
told.count = document.getElementById("count").textContent;
press("Enter", search);
told.found = [document.getElementById("count").textContent, on(0)];
press("Escape", search);
told.forgotten = document.querySelectorAll(".found").length;
press("r");
told.hidden = document.getElementById("resources").hidden;
const result = document.createElement("pre");
result.id = "told";
result.textContent = JSON.stringify(told);
document.body.append(result);
"""


@browser
def test_selecting_searching_and_keys(page: Path, tmp_path: Path) -> None:
    driven = tmp_path / "driven.html"
    driven.write_text(page.read_text().replace("</body>", f'<script>"use strict";{DRIVER}</script></body>'))
    shown = re.search(r'<pre id="told">(.*?)</pre>', chromium("--virtual-time-budget=4000", "--dump-dom", driven.as_uri()), re.S)
    assert shown is not None
    told = json.loads(html.unescape(shown[1]))
    assert told["start"] == [["sm_90", "asm"], ["gfx942", "asm"]]
    source, ptx, gcn = told["fromSource"]
    assert source == ["data[i] = scaled(data[i], 2.0)"]
    assert [text.split("\t")[0].strip() for text in ptx if not text.startswith(".")] == ["ld.global.b32", "add.rn.f32", "st.global.b32"]
    assert [text.split()[0] for text in gcn if not text.startswith(".")] == [
        "global_load_dword",
        "s_waitcnt",
        "v_add_f32_e32",
        "global_store_dword",
    ]
    assert told["hash"] == f"#0%3A{CALL}&sm_90%2Fasm&gfx942%2Fasm"
    assert told["fromAssembly"][:2] == [["y = x * by"], ["data[i] = scaled(data[i], 2.0)"]]
    assert any(text.startswith("v_add_f32") for text in told["fromAssembly"][2])
    assert told["cleared"] == [[], [], []]
    assert told["third"] == ["y = x * by"]
    assert told["second"][-1].startswith("def scaled")
    assert (told["before"], told["target"], told["after"]) == ("llvm-opt", "gfx942", "asm")
    assert told["focused"] == "search" and re.fullmatch(r"\d+ lines", told["count"])
    assert told["found"][0].startswith("1 of ") and told["found"][1] == ["ep.store(flag, 1, order=ep.RELEASE, scope=ep.SYSTEM)"]
    assert told["forgotten"] == 0 and told["hidden"] is True


def pixels(path: Path) -> NDArray[np.int32]:
    """An 8-bit RGB or RGBA picture in PNG without interlacing: height x width x channels."""
    data, position, packed, head = path.read_bytes(), 8, b"", b""
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + size]
        head = body if kind == b"IHDR" else head
        packed += body if kind == b"IDAT" else b""
        position += size + 12
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", head)
    channels = {2: 3, 6: 4}[colour]
    assert depth == 8
    raw = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels).astype(np.int32)
    out = np.zeros((height, width * channels), np.int32)
    for y in range(height):
        kind, row = int(raw[y, 0]), raw[y, 1:]
        up = out[y - 1] if y else np.zeros_like(row)
        if kind == 1:
            out[y] = (np.cumsum(row.reshape(width, channels), axis=0) % 256).reshape(-1)
        elif kind in (0, 2):
            out[y] = (row + (up if kind == 2 else 0)) % 256
        else:
            out[y] = _predicted(kind, row.tolist(), up.tolist(), channels)
    return out.reshape(height, width, channels)[:, :, :3]


def _predicted(kind: int, row: list[int], up: list[int], channels: int) -> list[int]:
    """A row that was coded by the average (3) or by Paeth's predictor (4)."""
    made = [0] * channels
    corners = [0] * channels + up
    for value, above, corner in zip(row, up, corners, strict=False):
        left = made[-channels]
        guess = left + above - corner
        near = min((abs(guess - left), 0, left), (abs(guess - above), 1, above), (abs(guess - corner), 2, corner))[2]
        made.append((value + ((left + above) // 2 if kind == 3 else near)) % 256)
    return made[channels:]


ON = (0xFF, 0xE0, 0x8A)


@browser
def test_a_picture_shows_the_highlight_in_every_pane(page: Path, tmp_path: Path) -> None:
    width, height = 900, 420
    counts: list[list[int]] = []
    for name, hash_ in (("plain", ""), ("selected", f"#0:{CALL}&sm_90/asm&gfx942/asm")):
        picture = tmp_path / f"{name}.png"
        chromium(f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri() + hash_)
        marked = (pixels(picture) == ON).all(axis=2)
        counts.append([int(marked[:, pane * width // 3 : (pane + 1) * width // 3].sum()) for pane in range(3)])
    assert counts[0] == [0, 0, 0]
    # A line is 18 pixels high and as wide as its pane; text and the selection's edge are of other colours.
    source, ptx, gcn = counts[1]
    assert source > 18 * 200
    assert ptx > 3 * source and gcn > 3 * source
