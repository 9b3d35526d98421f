"""EP001 to EP039: names, statements, calls, types and numbers."""

from __future__ import annotations

from .code import ErrorCode, program

LANGUAGE = (
    ErrorCode(
        "EP001",
        "a name has no value on every path",
        "The name is read where some way through the kernel has not assigned it: one branch of an if, or a loop that may run zero times.",
        "Give it a value before the if or the loop, or assign it on every path.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                if n > 0:
                    total = n
                out[0] = total


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP002",
        "a name is not defined",
        "Neither the kernel, nor its module, nor Python itself has the name.",
        "Correct the spelling, or define the name before the kernel is compiled.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = m


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP003",
        "a name has two types",
        "On the device a variable has one type for good. Here it would have one on the first path, or before the loop, and another on "
        "the second, or after a turn of the loop.",
        "Convert, so that every path gives the same type: `total = ep.i64(0)` before the loop.",
        program("""
            @ep.kernel
            def kernel(a: ep.Ptr[ep.i64], out: ep.Ptr[ep.i64], n: ep.i32):
                total = 0
                for i in range(n):
                    total = total + a[i]
                out[0] = total


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP004",
        "no such attribute or field",
        "The value has no attribute, or the struct no field, of that name.",
        "Use one that exists; the message lists them or names the nearest.",
        program("""
            @ep.struct
            class Pair:
                first: ep.i32
                second: ep.f32


            @ep.kernel
            def kernel(pairs: ep.Ptr[Pair], out: ep.Ptr[ep.f32]):
                out[0] = pairs[0].third


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP005",
        "a statement or an expression that kernels do not have",
        "Kernels are a subset of Python: no exceptions, generators, classes, `for ... else`, and nothing that allocates on the device.",
        "Write it with if, for over range(), while, assignments, calls and operators. What runs while building may be an ordinary Python "
        "function of compile-time values, outside the kernel.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                try:
                    out[0] = 1
                except ValueError:
                    out[0] = 2


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP006",
        "the source of a function is not available",
        "A kernel is compiled from its text, and Python has none: the function was made by exec, in a bare REPL, or is a lambda.",
        "Define it with def in a file (a notebook's cells are files too).",
        program("""
            namespace = {"ep": ep, "__name__": "made"}
            exec("@ep.kernel\\ndef kernel(out: ep.Ptr[ep.i32]): out[0] = 1", namespace)
            namespace["kernel"].compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP007",
        "this cannot be assigned to",
        "Only names, fields of structs and elements of pointers, arrays and vectors can be assigned. Objects of the host are constants "
        "inside a kernel, and a struct that was passed to a function is a copy.",
        "Assign to p[i], to a field of a struct in memory (`p[i].field`), or return the new struct.",
        program("""
            class Settings:
                limit = 4


            settings = Settings()


            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                settings.limit = 8
                out[0] = settings.limit


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP008",
        "wrong arguments of a call",
        "A call gives too many arguments, too few, or one by a name that the function does not have; or a kernel is declared with a "
        "default or with *parameters, which no launch gives.",
        "Call it as the message shows.",
        program("""
            @ep.func
            def publish(flag: ep.Ptr[ep.u32], value: ep.u32):
                ep.store(flag, value, order=ep.RELEASE, scope=ep.SYSTEM)


            @ep.kernel
            def kernel(flag: ep.Ptr[ep.u32]):
                publish(flag, ep.u32(1), 2)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP009",
        "names and values differ in number",
        "An assignment to several names needs a tuple of just as many values, known while building.",
        "Write as many names as there are values.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                a, b, c = n, n + 1
                out[0] = a + b + c


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP010",
        "a device value where a constant is needed",
        "The value is known only when the kernel runs, and here the compiler needs it: `int()`, ep.unroll, an `ep.Const` parameter, a "
        "comprehension, an assert, a group's numbers.",
        "Pass it as `ep.Const[...]`, a dataclass field or a global; or use what works on the device: ep.i32(x), a plain loop, "
        "ep.device_assert.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                for i in ep.unroll(range(n)):
                    out[i] = 0


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP011",
        "an element cannot be chosen at run time",
        "A tuple, an `ep.Array` in a variable and a vector live in registers, which have no addresses: which one is used must be known "
        "while building.",
        "Unroll the loop (`ep.unroll(range(n))`), or keep the values in memory: ep.shared, or a pointer parameter.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                pair = (n, n + 1)
                out[0] = pair[ep.thread_idx.x]


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP012",
        "an ordinary Python function is given a device value",
        "Functions without @ep.func, print() and f-strings run while the kernel is built, when the value does not exist yet.",
        "Mark the function @ep.func, use the language's own (`ep.sqrt`), or print on the device with ep.printf.",
        program("""
            def twice(x):
                return x + x


            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = twice(n)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP013",
        "used outside a kernel, or a kernel called like a function",
        "Operations of the language and @ep.func functions exist only inside a kernel; a kernel is launched, not called.",
        "Call operations from an @ep.kernel or @ep.func; start a kernel with `kernel.launch(rank, grid=..., block=..., args=(...))`.",
        program("""
            ep.barrier()
        """),
    ),
    ErrorCode(
        "EP014",
        "this cannot be looped over",
        "A loop on the device runs over range() of integers of one type, with a step that is not 0; a pointer has no length.",
        "Write `for i in range(start, stop, step)`, or ep.unroll for a loop that is repeated while building.",
        program("""
            @ep.kernel
            def kernel(a: ep.Ptr[ep.i32], out: ep.Ptr[ep.i32]):
                for x in a:
                    out[0] = x


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP015",
        "recursion",
        "Device functions are inlined, so one that calls itself, directly or through others, would never end.",
        "Write a loop.",
        program("""
            @ep.func
            def down(n: ep.i32):
                return down(n - 1)


            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = down(n)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP016",
        "the kernel or a function never ends",
        "No path leaves the loop: it has no condition and no break or return that can be reached.",
        "Give the loop an exit. A kernel that waits uses ep.wait, which has a timeout.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32]):
                while True:
                    out[0] = 1


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP017",
        "a wrong return",
        "A kernel returns nothing, and a function returns a value on every path or on none.",
        "Store a kernel's result through a pointer parameter; return a value at the end of every path of a function.",
        program("""
            @ep.kernel
            def kernel(n: ep.i32):
                return n + 1


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP018",
        "the kernel refuses to be built",
        "Code that runs while building raised an exception: an assert on constants, a raise, or a compile-time function of yours.",
        "Read the message, which is yours: change the constants, or the function.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.Const[int]):
                assert n % 4 == 0, f"n is {n}, not a multiple of 4"
                out[0] = n


            kernel.compile("sm_90", n=6)
        """),
    ),
    ErrorCode(
        "EP019",
        "this cannot be called",
        "What stands before the parentheses is a value and no function.",
        "Call a function of the language, an @ep.func, or a compile-time function; index with [ ].",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = n(1)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP020",
        "not a type of the language",
        "An annotation of a parameter or a field is a Python or NumPy type, or an expression that cannot be evaluated.",
        "Use ep.i32, ep.f32, ep.Ptr[...], ep.Peers[...], ep.vec(...), a struct, or ep.Const[int] for a compile-time parameter.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: int):
                out[0] = n


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP021",
        "a parameter has no type",
        "Every parameter of a kernel is typed: its type says how the argument is passed.",
        "Annotate it: `n: ep.i32`.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n):
                out[0] = n


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP022",
        "this type cannot be passed to a kernel",
        "A parameter is a scalar, a pointer, a table of peers or a struct of these; a vector is passed by no driver.",
        "Pass a pointer to it, or its elements as scalars or in a struct.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.f32], v: ep.vec(ep.f32, 4)):
                out[0] = v[0]


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP023",
        "not a vector the language has",
        "A vector has 2, 4, 8 or 16 elements and at most 16 bytes, the widest access of every target, and takes as many values as "
        "elements, or one for all.",
        "Choose a width that fits, or use several vectors.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.f64]):
                v = ep.load(out, width=4)
                out[0] = v[0]


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP024",
        "no common type without losing values",
        "An operator joins two types only where one holds every value of the other. A signed and an unsigned integer of one width, or an "
        "integer and a float of one width, have no such type, and none is guessed.",
        "Convert one side: ep.i64(a), ep.f32(n).",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.f32], n: ep.i32):
                out[0] = out[1] * n


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP025",
        "a number does not fit its type",
        "A number written in the kernel takes the type of the other side, and that type does not hold it.",
        "Write a number that fits, or use a wider type.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.u8]):
                out[0] = 256


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP026",
        "this operation is not defined for these types",
        "The operator or function has no meaning for the values: `/` of integers, ordering of vectors, arithmetic of 8-bit floats, "
        "operators of a pointer other than + - and comparisons.",
        "Convert first, or use the operation that exists; the message names it.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = n / 2


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP027",
        "a division by zero, or a shift by too much",
        "The number is known while building, and the result is defined on no target.",
        "Divide by another number; shift by less than the type has bits.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = n << 32


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP028",
        "a value of another type is given",
        "An element, a field, a parameter or a result has its type, and the value has another that does not become it without losing "
        "values, or at all.",
        "Convert explicitly: ep.i32(x), ep.u64(p), ep.bitcast(x, T).",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], x: ep.f32):
                out[0] = x


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP029",
        "a wrong index",
        "An index is an integer, and where it is known while building it lies inside the vector, array or job.",
        "Use an integer from 0 to the size minus 1.",
        program("""
            @ep.kernel
            def kernel(a: ep.Ptr[ep.u32], out: ep.Ptr[ep.u32]):
                v = ep.load(a, width=4)
                out[0] = v[4]


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP030",
        "this is no condition",
        "Pointers, vectors and structs are neither true nor false.",
        "Compare: `ep.u64(p) != 0`.",
        program("""
            @ep.kernel
            def kernel(p: ep.Ptr[ep.i32]):
                if p:
                    p[0] = 1


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP031",
        "this has no elements",
        "A scalar or a struct is indexed.",
        "Index a pointer, an array or a vector; read a struct's fields by name.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.i32):
                out[0] = n[0]


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP032",
        "this cannot be a device value",
        "The device holds numbers, pointers, vectors and structs; here it is given a Python object: None, a text, a list, a function.",
        "Give it a number or a value that the kernel computed.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.f32]):
                out[0] = ep.sqrt(None)


            kernel.compile("sm_90")
        """),
    ),
    ErrorCode(
        "EP033",
        "constants are missing or unknown",
        "`compile` is given every `ep.Const` parameter of the kernel by name, and nothing else.",
        "Name each of them: `kernel.compile(target, n=4)`.",
        program("""
            @ep.kernel
            def kernel(out: ep.Ptr[ep.i32], n: ep.Const[int]):
                out[0] = n


            kernel.compile("sm_90", m=4)
        """),
    ),
    ErrorCode(
        "EP034",
        "a kernel of a class whose fields may change",
        "The fields of the instance become constants of the compiled kernel, so they must not change later.",
        "Make the class a dataclass with frozen=True.",
        program("""
            class Family:
                n = 4

                @ep.kernel
                def kernel(self, out: ep.Ptr[ep.i32]):
                    out[0] = self.n


            Family().kernel.compile("sm_90")
        """),
    ),
)
