"""What the lowerings to NVIDIA and AMD share: the driver that applies one pattern to each `ep` operation, and names for LLVM operations.

A pattern is a function `(op: Op, target: Target) -> list of values`, one for each result. It runs with the insertion point before the
operation and the operation's location, and it must not erase anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from epdsl_runtime.errors import CodedError
from mlir import ir, rewrite
from mlir.dialects import llvm, math

from epdsl.ir.steps import Step, upstream
from epdsl.targets import Target

SHARED_SYMBOL = "ep_shared"
GLOBAL, SHARED = 1, 3


class LoweringError(CodedError):
    """An operation the target has no instruction for. Names operation, order, scope, type and place.

    location  the operation's, an MLIR location
    """

    location: Any = None


class Op:
    """Read access to one `ep` operation."""

    def __init__(self, operation: ir.Operation, target: Target):
        self.operation = operation
        self.target = target
        self.name: str = operation.name
        self.operands: list[Any] = list(operation.operands)

    def __getattr__(self, name: str) -> Any:
        return self.attribute(name)

    def attribute(self, name: str) -> Any:
        """A string or integer attribute."""
        if name not in self.operation.attributes:
            raise AttributeError(f"{self.name} has no attribute {name!r}")
        return self.operation.attributes[name].value  # type: ignore[attr-defined]

    @property
    def result_type(self) -> Any:
        return self.operation.results[0].type

    def error(self, code: str, why: str, what_to_do: str) -> LoweringError:
        """`why` no row fits, after what the operation is and where it stands."""
        told = ("op", "kind", "order", "scope", "cache", "name", "space")
        words = [f"{k} {self.attribute(k)}" for k in told if k in self.operation.attributes]
        types = ", ".join(str(v.type) for v in self.operands)
        described = " ".join([self.name, *words, f"on ({types})"])
        error = LoweringError(code, f"{self.operation.location}: {described}: {why} on {self.target.name}. {what_to_do}")
        error.location = self.operation.location
        return error


Pattern = Callable[[Op, Target], Sequence[Any]]


def gpu_modules(module: Any) -> Iterator[Any]:
    """The `gpu.module`s of a builtin module."""
    for op in module.body.operations:
        if op.operation.name == "gpu.module":
            yield op.operation


def kernels(gpu_module: Any) -> list[Any]:
    """The `gpu.func`s of a `gpu.module`."""
    return [op.operation for op in gpu_module.regions[0].blocks[0].operations if op.operation.name == "gpu.func"]


def named(root: Any, names: Iterable[str]) -> list[Any]:
    """The operations of these names nested in `root`. The driver of patterns finds them: a walk in Python costs more than a pass."""
    found: list[Any] = []

    def note(view: Any, _: Any) -> bool:
        found.append(view.operation)
        return True  # No match: nothing is changed.

    patterns = rewrite.RewritePatternSet()
    for name in names:
        patterns.add(name, note)
    rewrite.walk_and_apply_patterns(root, patterns.freeze())
    return found


def rewrite_all(module: Any, target: Target, patterns: Mapping[str, Pattern]) -> None:
    """Replaces every operation that has a pattern by what the pattern builds."""
    rewrites = rewrite.RewritePatternSet()
    for name, pattern in patterns.items():
        rewrites.add(name, _pattern(pattern, target))
    rewrite.walk_and_apply_patterns(module.operation, rewrites.freeze())


def _pattern(pattern: Pattern, target: Target) -> Callable[[Any, Any], None]:
    def apply(view: Any, rewriter: Any) -> None:
        operation = view.operation
        with rewriter.ip, operation.location:
            values = list(pattern(Op(operation, target), target))
        if operation.results:
            rewriter.replace_op(operation, values)
        else:
            rewriter.erase_op(operation)

    return apply


def functions_to_llvm(gpu_module: Any, kernel_attribute: str, max_threads: Callable[[int | None], dict[str, Any]]) -> None:
    """Turns each `gpu.func` into an `llvm.func`. Their parameters are LLVM types already, so nothing is converted but the shell.

    kernel_attribute  marks the function as a kernel for the translation to LLVM IR
    max_threads       attributes that tell the code generator the block size of `ep.max_threads` (None: not given)
    """
    for old in kernels(gpu_module):
        function_type = ir.TypeAttr(old.attributes["function_type"]).value
        inputs = ", ".join(str(t) for t in ir.FunctionType(function_type).inputs)
        given = old.attributes["ep.max_threads"].value if "ep.max_threads" in old.attributes else None
        attributes = {
            "sym_name": old.attributes["sym_name"],
            "function_type": ir.TypeAttr.get(ir.Type.parse(f"!llvm.func<void ({inputs})>")),
            "CConv": ir.Attribute.parse("#llvm.cconv<ccc>"),
            "linkage": ir.Attribute.parse("#llvm.linkage<external>"),
            kernel_attribute: ir.UnitAttr.get(),
            **max_threads(given),
        }
        with ir.InsertionPoint(old), old.location:
            new = ir.Operation.create("llvm.func", attributes=attributes, regions=1)
        for block in list(old.regions[0].blocks):
            block.append_to(new.regions[0])
        for last in named(new, ("gpu.return",)):
            with ir.InsertionPoint(last), last.location:
                llvm.ReturnOp()
            last.erase()
        old.erase()


def declare_shared(gpu_module: Any) -> None:
    """Declares the block's dynamic shared memory."""
    add_text(
        gpu_module,
        f"llvm.mlir.global external @{SHARED_SYMBOL}() {{addr_space = 3 : i32, alignment = 128 : i64}} : !llvm.array<0 x i8>",
    )


def add_text(gpu_module: Any, text: str) -> None:
    """Puts the operations of MLIR `text` at the head of a `gpu.module`."""
    parsed = ir.Module.parse(text)
    first = gpu_module.regions[0].blocks[0].operations[0]
    for op in list(parsed.body.operations):
        op.operation.move_before(first)


def each_gpu_module(name: str, change: Callable[[Any], None]) -> Step:
    """A pass of ours: `change` is given each `gpu.module`."""

    def run(module: Any) -> None:
        with module.context, ir.Location.unknown():
            for gpu_module in gpu_modules(module):
                change(gpu_module)

    return Step(name, run)


def to_llvm_dialect(emission_kind: str) -> tuple[Step, ...]:
    """Upstream conversions of everything that is not `ep`, then source lines on the functions."""
    return (
        *(upstream(f"gpu.module(convert-{dialect}-to-llvm)") for dialect in ("vector", "math", "arith")),
        upstream("convert-cf-to-llvm"),
        upstream("gpu.module(reconcile-unrealized-casts)"),
        upstream(f"ensure-debug-info-scope-on-llvm-func{{emission-kind={emission_kind}}}"),
    )


# Types


def integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def bits(type_: Any) -> int:
    """Size of a scalar, vector or pointer type in bits."""
    if isinstance(type_, ir.VectorType):
        vector = ir.VectorType(type_)
        return bits(vector.element_type) * vector.shape[0]
    if isinstance(type_, ir.IntegerType):
        return ir.IntegerType(type_).width
    if isinstance(type_, ir.FloatType):
        return ir.FloatType(type_).width
    return 64


def is_vector(type_: Any) -> bool:
    return isinstance(type_, ir.VectorType)


def is_float(type_: Any) -> bool:
    return isinstance(type_, ir.FloatType)


def alignment(type_: Any) -> int:
    """Bytes an access of this type is aligned to: its own size, or its element's when that is no power of two."""
    size = max(1, bits(type_) // 8)
    if size & (size - 1) == 0:
        return size
    return bits(ir.VectorType(type_).element_type) // 8


def address_space(value: Any) -> int:
    """1 (global) or 3 (block-shared) of a pointer."""
    return llvm.PointerType(value.type).address_space  # type: ignore[attr-defined]


# LLVM operations, at the current insertion point and location


def constant(value: int, width: int = 32) -> Any:
    return llvm.ConstantOp(integer(width), ir.IntegerAttr.get(integer(width), value)).result


def intrinsic(name: str, result: Any, *args: Any) -> Any:
    """Calls an LLVM intrinsic; the value, or None where `result` is None."""
    call = llvm.CallIntrinsicOp(result, ir.StringAttr.get(name), list(args), [], [])
    return call.operation.results[0] if result is not None else None


def call(name: str, result: Any, *args: Any) -> Any:
    """Calls an `llvm.func` of the same module."""
    made = llvm.CallOp(result, list(args), [], [], callee=ir.FlatSymbolRefAttr.get(name))
    return made.result if result is not None else None


def assembly(text: str, constraints: str, args: Sequence[Any], results: Sequence[Any] = (), effects: bool = True) -> list[Any]:
    """Inline assembly; with `effects` also a compiler barrier for memory."""
    if effects:
        constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    match list(results):
        case []:
            result = None
        case [one]:
            result = one
        case many:
            result = ir.Type.parse(f"!llvm.struct<({', '.join(str(t) for t in many)})>")
    made = llvm.InlineAsmOp(result, list(args), text, constraints, has_side_effects=effects)
    if len(results) < 2:
        return [made.res] if results else []
    return [extract(made.res, i, t) for i, t in enumerate(results)]


def extract(aggregate: Any, index: int, type_: Any) -> Any:
    return llvm.ExtractValueOp(type_, aggregate, ir.DenseI64ArrayAttr.get([index])).result


def bitcast(value: Any, type_: Any) -> Any:
    return value if value.type == type_ else llvm.BitcastOp(type_, value).result


def resize(value: Any, width: int) -> Any:
    """Truncates or zero-extends an integer."""
    have = bits(value.type)
    if have == width:
        return value
    if have > width:
        return llvm.TruncOp(integer(width), value, llvm.IntegerOverflowFlags.none).result
    return llvm.ZExtOp(integer(width), value).result


def add(a: Any, b: Any) -> Any:
    return llvm.AddOp(a, b, llvm.IntegerOverflowFlags.none).result


def subtract(a: Any, b: Any) -> Any:
    return llvm.SubOp(a, b, llvm.IntegerOverflowFlags.none).result


def multiply(a: Any, b: Any) -> Any:
    return llvm.MulOp(a, b, llvm.IntegerOverflowFlags.none).result


def compare(predicate: str, a: Any, b: Any) -> Any:
    return llvm.ICmpOp(getattr(llvm.ICmpPredicate, predicate), a, b).result


def select(condition: Any, a: Any, b: Any) -> Any:
    return llvm.SelectOp(condition, a, b).result


def offset(ptr: Any, nbytes: int) -> Any:
    """`nbytes` further on."""
    return llvm.GEPOp(ptr.type, ptr, [], [nbytes], integer(8), llvm.GEPNoWrapFlags.none).result


def shared_address(op: Op) -> Any:
    """Byte `offset` of the block's dynamic shared memory."""
    base = llvm.AddressOfOp(op.result_type, ir.FlatSymbolRefAttr.get(SHARED_SYMBOL)).result
    return offset(base, op.offset) if op.offset else base


def halves(value: Any) -> tuple[Any, Any]:
    """Low and high 32 bits of a 64-bit value."""
    pair = bitcast(value, ir.VectorType.get([2], integer(32)))
    return tuple(llvm.ExtractElementOp(pair, constant(i), results=[integer(32)]).result for i in (0, 1))  # type: ignore[return-value]


def join(low: Any, high: Any, type_: Any) -> Any:
    """The 64-bit value of these halves."""
    return vector_of([low, high], type_)


def vector_of(words: Sequence[Any], type_: Any) -> Any:
    """The value of `type_` whose bits are these integers, the first lowest."""
    vector = llvm.PoisonOp(ir.VectorType.get([len(words)], words[0].type)).result
    for i, word in enumerate(words):
        vector = llvm.InsertElementOp(vector, word, constant(i)).result
    return bitcast(vector, type_)


def words_of(value: Any, count: int, width: int) -> list[Any]:
    """`value` cut into `count` integers of `width` bits, the lowest first."""
    if count == 1:
        return [bitcast(value, integer(width))]
    vector = bitcast(value, ir.VectorType.get([count], integer(width)))
    return [llvm.ExtractElementOp(vector, constant(i), results=[integer(width)]).result for i in range(count)]


NOT_IN_F64 = ("math.exp", "math.exp2", "math.log", "math.log2")
_MATH = tuple(each.OPERATION_NAME for each in vars(math).values() if hasattr(each, "OPERATION_NAME"))


def check_math(gpu_module: Any, target: Target, patterns: Mapping[str, Pattern], known: Sequence[str]) -> None:
    """Refuses `math` operations the code generator would abort the process on."""
    for operation in named(gpu_module, [name for name in _MATH if name not in patterns]):
        name = operation.name
        if name.removeprefix("math.") not in known:
            raise Op(operation, target).error("EP104", "there is no code for it", "Write it with operations the target has.")
        if name in NOT_IN_F64 and isinstance(operation.operands[0].type, ir.F64Type):
            raise Op(operation, target).error("EP104", "there is no code for f64", "Convert to f32 first.")
