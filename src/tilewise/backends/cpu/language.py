"""Drivers: plain Python functions on integers and floats, translated to LLVM IR statement by statement.

The language is the part of Python that control code needs: int64 and fp32 scalars, assignment, `if`, `while`, `for ...
in range`, arithmetic, comparisons, `min`, `max`, conditional expressions, and calls of other drivers and of kernels.
Integers wrap; `//` and `%` take non-negative operands; nothing raises. A general Python compiler would take far longer,
and translation is most of the cold start.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from tilewise.backends.cpu.emit import F32, I64, Value

BOOL = ir.IntType(1)
COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
INTEGER_OPERATIONS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "udiv",
    ast.Mod: "urem",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.LShift: "shl",
    ast.RShift: "lshr",
}
FLOAT_OPERATIONS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
LLVM_TYPES = {"int": I64, "float": F32, "None": ir.VoidType()}


def source_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """The syntax tree of a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def names_in(function: Callable[..., Any]) -> dict[str, Any]:
    """What the names of a function mean: its module's, and those of a function around it."""
    return function.__globals__ | dict(inspect.getclosurevars(function).nonlocals)


def signature_of(function: Callable[..., Any]) -> ir.FunctionType:
    """A function's C-like type, from its annotations: int is int64, float is fp32."""
    notes = inspect.get_annotations(function)
    arguments = [LLVM_TYPES[str(note)] for name, note in notes.items() if name != "return"]
    return ir.FunctionType(LLVM_TYPES[str(notes["return"])], arguments)


class Translator:
    """Translates one function into `target`; `callee(name)` gives the LLVM function for a global name, or None."""

    def __init__(
        self, function: Callable[..., Any], target: ir.Function, callee: Callable[[str], ir.Function | None]
    ) -> None:
        self.globals = names_in(function)
        self.callee = callee
        self.target = target
        # Variables are stack slots of the entry block, which LLVM turns into registers.
        self.slots = ir.IRBuilder(target.append_basic_block("slots"))
        self.b = ir.IRBuilder(target.append_basic_block("body"))
        self.variables: dict[str, Value] = {}
        self.loops: list[tuple[Value, Value]] = []
        tree = source_of(function)
        for argument, value in zip(tree.args.args, target.args, strict=True):
            self.assign(argument.arg, value)
        self.block(tree.body)
        if not self.b.block.is_terminated:
            self.b.ret_void()
        self.slots.branch(target.blocks[1])

    # Statements

    def block(self, statements: list[ast.stmt]) -> None:
        """Translate statements until control leaves."""
        for statement in statements:
            getattr(self, f"do_{type(statement).__name__.lower()}")(statement)
            if self.b.block.is_terminated:
                break

    def do_expr(self, node: ast.Expr) -> None:
        """A call for its effect, or the docstring."""
        if not isinstance(node.value, ast.Constant):
            self.value(node.value)

    def do_assign(self, node: ast.Assign) -> None:
        """`a = x` and `a, b = x, y`."""
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            assert isinstance(node.value, ast.Tuple)
            values = [self.value(part) for part in node.value.elts]
            for name, value in zip(target.elts, values, strict=True):
                self.assign(name.id, value)  # type: ignore[attr-defined]
        else:
            self.assign(target.id, self.value(node.value))  # type: ignore[attr-defined]

    def do_augassign(self, node: ast.AugAssign) -> None:
        """`a += x`."""
        name = node.target.id  # type: ignore[union-attr]
        self.assign(name, self.arithmetic(node.op, self.b.load(self.variables[name]), self.value(node.value)))

    def do_return(self, node: ast.Return) -> None:
        """`return` with or without a value."""
        if node.value is None:
            self.b.ret_void()
        else:
            self.b.ret(self.converted(self.value(node.value), self.target.function_type.return_type))

    def do_continue(self, node: ast.Continue | ast.Break) -> None:
        """`continue` and `break`."""
        self.b.branch(self.loops[-1][isinstance(node, ast.Break)])

    do_break = do_continue

    def do_if(self, node: ast.If) -> None:
        """`if`, `elif`, `else`."""
        yes, no, after = (self.target.append_basic_block(name) for name in ("then", "else", "after"))
        self.b.cbranch(self.truth(node.test), yes, no)
        for start, statements in ((yes, node.body), (no, node.orelse)):
            self.b.position_at_end(start)
            self.block(statements)
            if not self.b.block.is_terminated:
                self.b.branch(after)
        self.b.position_at_end(after)

    def do_while(self, node: ast.While) -> None:
        """`while`."""
        test, body, after = (self.target.append_basic_block(name) for name in ("test", "body", "after"))
        self.b.branch(test)
        self.b.position_at_end(test)
        self.b.cbranch(self.truth(node.test), body, after)
        self.loop_body(node.body, body, test, after)

    def do_for(self, node: ast.For) -> None:
        """`for name in range(...)`, with a positive step."""
        name = node.target.id  # type: ignore[attr-defined]
        bounds = [self.value(argument) for argument in node.iter.args]  # type: ignore[attr-defined]
        start, stop, step = ([ir.Constant(I64, 0), *bounds] if len(bounds) == 1 else bounds) + (
            [ir.Constant(I64, 1)] * (len(bounds) < 3)
        )
        test, body, following, after = (self.target.append_basic_block(n) for n in ("test", "body", "next", "after"))
        counter = self.slots.alloca(I64)
        self.b.store(start, counter)
        self.b.branch(test)
        self.b.position_at_end(test)
        index = self.b.load(counter)
        self.b.cbranch(self.b.icmp_signed("<", index, stop), body, after)
        self.b.position_at_end(body)
        self.assign(name, index)
        self.loop_body(node.body, body, following, after)
        self.b.position_at_end(following)
        self.b.store(self.b.add(self.b.load(counter), step), counter)
        self.b.branch(test)
        self.b.position_at_end(after)

    def loop_body(self, statements: list[ast.stmt], body: Value, following: Value, after: Value) -> None:
        """The body of a loop, which continues at `following` and breaks to `after`."""
        self.b.position_at_end(body)
        self.loops.append((following, after))
        self.block(statements)
        if not self.b.block.is_terminated:
            self.b.branch(following)
        self.loops.pop()
        self.b.position_at_end(after)

    # Expressions

    def assign(self, name: str, value: Value) -> None:
        """Set a variable; its type is that of its first value."""
        if value.type == BOOL:
            value = self.b.zext(value, I64)
        if name not in self.variables:
            self.variables[name] = self.slots.alloca(value.type, name=name)
        slot = self.variables[name]
        self.b.store(self.converted(value, slot.allocated_type), slot)

    def value(self, node: ast.expr) -> Value:
        """An int64, fp32 or bool value."""
        result: Value = getattr(self, f"of_{type(node).__name__.lower()}")(node)
        return result

    def of_constant(self, node: ast.Constant) -> Value:
        """A number or truth value."""
        return self.constant(node.value)

    def constant(self, number: Any) -> Value:
        """A Python number as an LLVM constant."""
        if isinstance(number, float):
            return ir.Constant(F32, number)
        return ir.Constant(BOOL if isinstance(number, bool) else I64, int(number))

    def of_name(self, node: ast.Name) -> Value:
        """A variable, or a global number."""
        if node.id in self.variables:
            return self.b.load(self.variables[node.id])
        return self.constant(self.globals[node.id])

    def of_attribute(self, node: ast.Attribute) -> Value:
        """A number in a module: `params.Q_ROW`."""
        return self.constant(getattr(self.globals[node.value.id], node.attr))  # type: ignore[attr-defined]

    def of_unaryop(self, node: ast.UnaryOp) -> Value:
        """`-x` and `not x`."""
        if isinstance(node.op, ast.Not):
            return self.b.not_(self.truth(node.operand))
        operand = self.value(node.operand)
        return self.b.fneg(operand) if operand.type == F32 else self.b.neg(operand)

    def of_binop(self, node: ast.BinOp) -> Value:
        """Arithmetic. An int next to a float becomes a float."""
        return self.arithmetic(node.op, self.value(node.left), self.value(node.right))

    def arithmetic(self, operation: ast.operator, left: Value, right: Value) -> Value:
        """One operation on two values."""
        left, right = self.alike(left, right)
        table = FLOAT_OPERATIONS if left.type == F32 else INTEGER_OPERATIONS
        result: Value = getattr(self.b, table[type(operation)])(left, right)
        return result

    def of_compare(self, node: ast.Compare) -> Value:
        """One comparison, or a chain of them; as in Python a NaN is unequal to everything."""
        operands = [self.value(operand) for operand in (node.left, *node.comparators)]
        result = None
        for operation, left, right in zip(node.ops, operands, operands[1:], strict=False):
            left, right = self.alike(left, right)
            compare = self.b.icmp_signed
            if left.type == F32:
                compare = self.b.fcmp_unordered if isinstance(operation, ast.NotEq) else self.b.fcmp_ordered
            outcome = compare(COMPARISONS[type(operation)], left, right)
            result = outcome if result is None else self.b.and_(result, outcome)
        return result

    def of_boolop(self, node: ast.BoolOp) -> Value:
        """`and` and `or`; all operands are evaluated, which is safe where nothing raises."""
        combine = self.b.and_ if isinstance(node.op, ast.And) else self.b.or_
        result = self.truth(node.values[0])
        for operand in node.values[1:]:
            result = combine(result, self.truth(operand))
        return result

    def of_ifexp(self, node: ast.IfExp) -> Value:
        """`x if c else y`; only one side is evaluated, as a side may read memory."""
        yes, no, after = (self.target.append_basic_block(name) for name in ("then", "else", "after"))
        self.b.cbranch(self.truth(node.test), yes, no)
        arms = []
        for start, side in ((yes, node.body), (no, node.orelse)):
            self.b.position_at_end(start)
            arms.append((self.value(side), self.b.block))
        kind = F32 if F32 in (arms[0][0].type, arms[1][0].type) else I64
        merged = []
        for value, block in arms:
            self.b.position_at_end(block)
            merged.append((self.converted(value, kind), block))
            self.b.branch(after)
        self.b.position_at_end(after)
        result = self.b.phi(kind)
        for value, block in merged:
            result.add_incoming(value, block)
        return result

    def of_call(self, node: ast.Call) -> Value:
        """`min`, `max`, or another function of the program."""
        name = node.func.id  # type: ignore[attr-defined]
        arguments = [self.value(argument) for argument in node.args]
        if name in ("min", "max"):
            left, right = self.alike(arguments[0], arguments[1])
            compare = self.b.fcmp_ordered if left.type == F32 else self.b.icmp_signed
            return self.b.select(compare("<" if name == "min" else ">", left, right), left, right)
        function = self.callee(name)
        if function is None:
            raise NameError(f"{self.target.name} calls {name}, which is neither a driver nor a kernel")
        kinds = function.function_type.args
        return self.b.call(function, [self.converted(v, kind) for v, kind in zip(arguments, kinds, strict=True)])

    # Types

    def truth(self, node: ast.expr) -> Value:
        """A condition: an integer is true if it is not 0."""
        value = self.value(node)
        return value if value.type == BOOL else self.b.icmp_signed("!=", value, ir.Constant(I64, 0))

    def converted(self, value: Value, kind: Any) -> Value:
        """The value as another type: int to float, bool to int."""
        if value.type == BOOL and kind != BOOL:
            value = self.b.zext(value, I64)
        if value.type == kind:
            return value
        if value.type == I64 and kind == F32:
            return self.b.sitofp(value, F32)
        raise TypeError(f"{self.target.name}: a float cannot become an integer")

    def alike(self, left: Value, right: Value) -> tuple[Value, Value]:
        """Both operands as floats if one is a float, else as integers."""
        kind = F32 if F32 in (left.type, right.type) else I64
        return self.converted(left, kind), self.converted(right, kind)
