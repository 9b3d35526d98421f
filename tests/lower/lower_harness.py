"""Compiles one tiny kernel a row and says which instructions it became."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from mlir import ir

from epdsl import codegen
from epdsl.ir import dialect
from epdsl.targets import parse_target

POINTER = {"global": "!llvm.ptr<1>", "shared": "!llvm.ptr<3>"}


@dataclass(frozen=True)
class Row:
    """One kernel: parameters, and a body in generic form. `%sN` names are free; `sink(%x : type)` keeps a value alive."""

    params: str
    body: str


@cache
def context() -> ir.Context:
    made = ir.Context()
    dialect.register(made)
    return made


def _sink(match: re.Match[str], comment: str, register: str) -> str:
    value, type_ = match[1], match[2]
    return f'llvm.inline_asm has_side_effects "{comment} sink $0", "{register}" {value} : ({type_}) -> ()'


# On AMD a row's pointer differs by lane, or the access would become a scalar load or be combined over the wave; and a plain store to
# other memory goes before, for a release to wait for.
_AMD_PREFIX = """%t = "ep.special"() {name = "thread_idx.x"} : () -> i32
%c = arith.constant 7 : i32
%p = llvm.getelementptr %base[%t] : (POINTER, i32) -> POINTER, !llvm.array<16 x i8>
"ep.store"(%c, %other) {order = "plain", scope = "none", cache = "default"} : (i32, !llvm.ptr<1>) -> ()
"""


def module_text(rows: Mapping[str, Row], vendor: str) -> str:
    registers = {"i1": "r", "i16": "h", "i32": "r", "i64": "l", "f32": "f", "f64": "d", "bf16": "h", "f16": "h"}
    functions = []
    for name, row in rows.items():
        params, body = row.params, row.body
        if vendor == "nvidia":
            body = re.sub(r"sink\((%\w+) : (\w+)\)", lambda m: _sink(m, "//", registers[m[2]]), body)
        else:
            body = re.sub(r"sink\((%\w+) : (\w+)\)", lambda m: _sink(m, ";", "v"), body)
            if found := re.match(r"%p: (\S+?)(,|$)", params):
                params = params.replace("%p:", "%base:", 1) + ", %other: !llvm.ptr<1>"
                body = _AMD_PREFIX.replace("POINTER", found[1]) + body
        functions.append(f"gpu.func @{name}({params}) kernel {{\n{body}\ngpu.return }}")
    return "module attributes {gpu.container_module} { gpu.module @kernel_module {\n" + "\n".join(functions) + "\n} }"


def lower(text: str, target_name: str) -> tuple[ir.Module, int]:
    target = parse_target(target_name)
    if target.vendor == "nvidia":
        from epdsl.lower_nvvm import lower as lowering
    else:
        from epdsl.lower_rocdl import lower as lowering
    module = ir.Module.parse(text, context())
    return module, lowering(module, target)


def compile_text(text: str, target_name: str) -> codegen.Code:
    module, _ = lower(text, target_name)
    return codegen.emit(module, parse_target(target_name))


def compile_rows(rows: Mapping[str, Row], target_name: str) -> codegen.Code:
    return compile_text(module_text(rows, parse_target(target_name).vendor), target_name)


_PTX_KEPT = re.compile(
    r"ld\.(?!param)|st\.|atom|red\.|fence|bar|shfl|vote|elect|nanosleep|mbarrier|cp\.|trap|neg\.|ex2|lg2|rsqrt|mul|add\.f|fma"
)


def ptx_instructions(ptx: str) -> dict[str, list[str]]:
    """Mnemonics by kernel, without parameter loads, register moves and address arithmetic."""
    found = {}
    for name, body in re.findall(r"\.entry (\w+)\(.*?\)\n(?:\.\w+.*\n)*\{\n(.*?)\n\}", ptx, re.S):
        lines = (line.strip() for line in body.splitlines())
        parts = (part.strip() for line in lines if not line.startswith(("//", ".")) for part in line.split(";"))
        found[name] = [part.split()[0] for part in parts if _PTX_KEPT.match(part)]
    return found


_GCN_FLAGS = ("sc0", "sc1", "nt", "glc", "slc", "dlc")
_GCN_KEPT = re.compile(r"global_|ds_|buffer_|flat_|s_wait|s_barrier|s_sleep|s_trap|s_memtime|s_memrealtime|s_sendmsg_rtn")


def gcn_instructions(gcn: str) -> dict[str, list[str]]:
    """Mnemonics with cache bits, by kernel, of memory accesses, waits for vector memory, barriers and clocks; without waits at the end."""
    found = {}
    for name, body in re.findall(r"^(\w+):(?:[^\n]*)\n(.*?)^\.Lfunc_end", gcn, re.S | re.M):
        kept: list[str] = []
        for line in body.splitlines():
            words = line.split(";")[0].replace(",", " ").split()
            if not words or not _GCN_KEPT.match(words[0]):
                continue
            if words[0].startswith("s_wait"):
                waits = [w for w in words[1:] if not w.startswith("lgkmcnt") and w != "null"]
                if waits and words[0] != "s_wait_kmcnt":
                    kept.append(" ".join([words[0], *waits]))
            else:
                kept.append(" ".join([words[0], *(w for w in words[1:] if w in _GCN_FLAGS or w.startswith(("scope:", "th:")))]))
        while kept and kept[-1].startswith("s_wait"):
            kept.pop()
        found[name] = kept
    return found


def instructions(rows: Mapping[str, Row], target_name: str) -> dict[str, list[str]]:
    """What each row became, without linking."""
    target = parse_target(target_name)
    module, _ = lower(module_text(rows, target.vendor), target_name)
    unit, machine = codegen.optimise(codegen.translate(module), target)
    text = machine.emit_assembly(unit)
    return ptx_instructions(text) if target.vendor == "nvidia" else gcn_instructions(text)


def differences(expected: Mapping[str, Iterable[str]], got: Mapping[str, list[str]]) -> str:
    """One line a row that became something else."""
    return "\n".join(
        f"{name}: expected {list(want)}, got {got.get(name)}" for name, want in expected.items() if list(want) != got.get(name)
    )


# Rows


def memory_row(op: str, type_: str, space: str, order: str, scope: str, kind: str = "", cache_: str = "default") -> Row:
    """One load, store, atomic_rmw, reduce or atomic_cas of `type_` through a parameter in `space`."""
    ptr = POINTER[space]
    access = f'order = "{order}", scope = "{scope}"'
    cached = f'{access}, cache = "{cache_}"'
    match op:
        case "load":
            return Row(f"%p: {ptr}", f'%s0 = "ep.load"(%p) {{{cached}}} : ({ptr}) -> {type_}\n{_use(type_)}')
        case "store":
            return Row(f"%p: {ptr}, %v: {type_}", f'"ep.store"(%v, %p) {{{cached}}} : ({type_}, {ptr}) -> ()')
        case "atomic_rmw":
            return Row(
                f"%p: {ptr}, %v: {type_}",
                f'%s0 = "ep.atomic_rmw"(%p, %v) {{op = "{kind}", {access}}} : ({ptr}, {type_}) -> {type_}\n{_use(type_)}',
            )
        case "reduce":
            return Row(f"%p: {ptr}, %v: {type_}", f'"ep.reduce"(%p, %v) {{op = "{kind}", {access}}} : ({ptr}, {type_}) -> ()')
        case _:
            return Row(
                f"%p: {ptr}, %v: {type_}, %w: {type_}",
                f'%s0 = "ep.atomic_cas"(%p, %v, %w) {{{access}}} : ({ptr}, {type_}, {type_}) -> {type_}\n{_use(type_)}',
            )


def _use(type_: str) -> str:
    """Keeps %s0 alive."""
    if type_ == "i8":
        return "%s1 = arith.extui %s0 : i8 to i16\nsink(%s1 : i16)"
    if not type_.startswith("vector"):
        return f"sink(%s0 : {type_})"
    count, element = re.fullmatch(r"vector<(\d+)x(\w+)>", type_).groups()  # type: ignore[union-attr]
    lines = []
    for i in range(int(count)):
        lines.append(f"%e{i} = vector.extract %s0[{i}] : {element} from {type_}")
        if element == "i8":
            lines += [f"%x{i} = arith.extui %e{i} : i8 to i16", f"sink(%x{i} : i16)"]
        else:
            lines.append(f"sink(%e{i} : {element})")
    return "\n".join(lines)
