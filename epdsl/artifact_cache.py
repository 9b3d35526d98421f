"""Compiling a kernel at most once for a machine and a set of sources.

Two keys lead to an entry. The quick one is of what building the kernel would read (`epdsl.fingerprint.reads`) and finds an artifact without
building it. The exact one is of the IR that was built, locations included because line tables come from them; it finds the code where
the sources differ in nothing that matters.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from epdsl_runtime.artifact import FORMAT, Artifact

import epdsl.cache as cache
import epdsl.fingerprint as fingerprint
from epdsl.compiler import Code, CompileRequest, artifact_of, collector_paused, compile_kernel, emit
from epdsl.env import DUMP, OVERRIDE_DIR, VERIFY
from epdsl.ir.steps import Watch, bytecode, bytecode_text
from epdsl.stages import StageTexts

if TYPE_CHECKING:
    from epdsl.build import Built


def quick_key(request: CompileRequest) -> tuple[str, frozenset[str]] | None:
    """Names what building the kernel would read. With it, every name its code mentions. None where that cannot be told."""
    try:
        reads = fingerprint.reads(request.function, request.instance, dict(request.constants))
    except fingerprint.Unknown:
        return None
    machine = fingerprint.host() if request.target.simulated else ""
    options = (str(FORMAT), request.name, request.target.name, str(request.max_threads), str(request.blocks))
    return cache.key_of("artifact", *options, reads.digest, machine, fingerprint.COMPILER), reads.names


def exact_key(request: CompileRequest, built: Built) -> str:
    """Names the code of a built kernel."""
    target = request.target
    machine = fingerprint.host() if target.simulated else target.features
    return cache.key_of("code", request.name, target.name, machine, json.dumps(fingerprint.versions()), bytecode(built.module))


def compiled(request: CompileRequest) -> Artifact:
    """The kernel compiled, now or earlier; now where its stages are to be dumped. Raises CompileError with the line at fault."""
    if DUMP.get() or OVERRIDE_DIR.get():
        from epdsl.dump import of_environment

        files = of_environment()
        artifact = compile_kernel(request, watch=files)
        files.finish(artifact)
        return artifact
    with collector_paused():
        # What is to be verified has to be built.
        quick = None if VERIFY.get() else quick_key(request)
        found = _load(quick[0], request) if quick else None
        if found is not None:
            return found
        if not fingerprint.compiler_is_as_loaded():
            return compile_kernel(request)
        if quick is None:
            return _made(request)[0]
        with cache.locked(quick[0]):
            found = _load(quick[0], request)
            if found is not None:
                return found
            artifact, built, code_key = _made(request)
            if built.annotated <= quick[1]:
                # An annotation inside a function leaves no trace in the code that the quick key is made of.
                _store(quick[0], code_key, artifact, built)
            return artifact


# Python runs one thread at a time: kernels that are built and lowered one after the other reach LLVM, which runs beside it, sooner.
_turn = threading.RLock()


class _Turn(Watch):
    """Python's half of a compilation. Another thread has its turn when LLVM has this kernel."""

    _taken = False

    def __enter__(self) -> _Turn:
        self._taken = _turn.acquire(timeout=cache.LOCK_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._taken = False
            _turn.release()

    def begin(self, stage: str) -> None:
        super().begin(stage)
        if stage == "llvm-opt":
            self.__exit__()


def _made(request: CompileRequest) -> tuple[Artifact, Built, str]:
    """The kernel built, and its code from the cache or made."""
    from epdsl.build import build

    with _Turn() as turn:
        built = build(request)
        key = exact_key(request, built)
        code = _read_code(key)
        if code is None:
            # Whoever holds this lock has had its turn.
            with cache.locked(key):
                code = _read_code(key)
                if code is None:
                    code = emit(request, built, turn)
                    _write_code(key, request, code)
    return artifact_of(request, built, code), built, key


def _write_code(key: str, request: CompileRequest, code: Code) -> None:
    what = f"{request.name} for {request.target.name}"
    texts = {stage: text.encode() for stage, text in code.texts.items()}
    # The texts first: a reader that finds the code finds them too.
    cache.write(_texts_key(key), f"{what}: texts", cache.pack(texts))
    cache.write(key, f"{what}: code", cache.pack({"binary": code.binary, "shared": str(code.shared_bytes).encode()}))


def _read_code(key: str) -> Code | None:
    body, texts = cache.read(key), cache.read(_texts_key(key))
    if body is None or texts is None:
        return None
    return _code(body, {stage: text.decode() for stage, text in cache.unpack(texts).items()})


def _code(body: bytes, texts: Mapping[str, str]) -> Code:
    parts = cache.unpack(body)
    return Code(parts["binary"], texts, int(parts["shared"]))


def _texts_key(code_key: str) -> str:
    return cache.key_of("texts", code_key)


def _store(key: str, code_key: str, artifact: Artifact, built: Built) -> None:
    meta = {"code": code_key, **artifact.meta()}
    what = f"{artifact.name} for {artifact.target}"
    cache.write(_texts_key(key), f"{what}: dialect", built.bytecode)
    cache.write(key, what, json.dumps(meta).encode())


def _load(key: str, request: CompileRequest) -> Artifact | None:
    """The artifact kept under a quick key, with its code from where that is kept. Its texts are read when they are asked for."""
    body = cache.read(key)
    if body is None:
        return None
    meta = json.loads(body)
    packed = cache.read(meta["code"])
    if packed is None:
        return None

    def texts() -> Mapping[str, str]:
        ep, code = cache.read(_texts_key(key)), _read_code(meta["code"])
        if ep is None or code is None:
            return compile_kernel(request).texts
        return {"ep": bytecode_text(ep), **code.texts}

    return Artifact.of_meta(meta, cache.unpack(packed)["binary"], StageTexts(meta["texts"], texts, request))
