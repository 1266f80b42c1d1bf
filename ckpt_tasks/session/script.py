"""Rewrite a script as if it had the two lines of `resumable`, and find the variables that its loop carries over.

The script must have one loop over epochs and, inside it or in a function that it calls, one over a DataLoader. The
rest of the script is not changed. A script is refused if its source does not show for sure that a resume would restore
all that the loop needs. A variable is carried over if the source shows that the loop changes it and reads it again: a
best loss, a history, the sums of an epoch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from ckpt_tasks.errors import ConfigError

HOOK = "__ckpt__"  # The rewritten source calls the hook by this name.
_AROUND = ("enumerate", "tqdm", "trange")
_HINT = (
    "Write into the script: loader, epochs = resumable({run!r}, loader, range(N), model=model, optimizer=optimizer), "
    "and then: for epoch in epochs. Or use a Checkpointer, for a loop of another form."
)
Scope = ast.Module | ast.FunctionDef


@dataclass
class TrainingLoop:
    """The loop over epochs in the scope `around`, that over batches in `within`, and the loader's name in `around`."""

    epochs: ast.For
    around: Scope
    batches: ast.For
    within: Scope
    loader: str


def resumable_source(tree: ast.Module, run: str) -> None:
    """Rewrite a script's source; raise ConfigError if its loop is not understood."""
    _rewrite(tree, find_training_loop(tree, run))


def hint(run: str) -> str:
    """Return what to write into a script that is refused."""
    return _HINT.format(run=run)


def find_training_loop(tree: ast.Module, run: str) -> TrainingLoop:
    """Find the only loop over epochs that trains on a loader's batches; raise ConfigError if that is uncertain."""

    def refuse(why: str, at: ast.AST | None = None) -> NoReturn:
        line = f"line {at.lineno}: " if isinstance(at, ast.stmt | ast.expr) else ""
        raise ConfigError(f"{line}{why}", hint=hint(run))

    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    loops = []
    scopes: list[Scope] = [tree, *functions.values()]
    for scope in scopes:
        for loop in _loops(scope):
            trained = [inner for inner in _loops(loop) if _trains(inner)]
            calls = [] if trained else _calls(loop, functions)
            loops += [TrainingLoop(loop, scope, inner, scope, _iterated(inner)) for inner in trained]
            for call in calls:
                function = functions[ast.unparse(call.func)]
                inside = [inner for inner in _loops(function) if _trains(inner)]
                loops += [
                    TrainingLoop(loop, scope, inner, function, _given(call, function, _iterated(inner)))
                    for inner in inside
                ]
    if len(loops) != 1:
        refuse(f"the script has {len(loops)} loops over epochs that train on the batches of a loader, and not one")
    [training] = loops
    if not training.loader:
        refuse("the batches are not those of one name", training.batches.iter)
    if any(other is not training.epochs and training.epochs in ast.walk(other) for other in _loops(training.around)):
        refuse("the loop over epochs is inside another loop", training.epochs)
    for end in _ends(training.epochs):
        refuse("the loop over epochs may end early here, and a restart would train on", end)
    return training


def _loops(node: ast.AST) -> list[ast.For]:
    """Return the `for` loops below a node, except loops in functions below the node."""
    return [one for one in _below(node) if isinstance(one, ast.For)]


def _below(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from _below(child)


def _trains(loop: ast.For) -> bool:
    """Return True if a loop's own body has a backward pass, and no loop in it has one."""
    has = any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in _below(loop))
    return has and not any(map(_trains, _loops(loop)))


def _peeled(node: ast.expr) -> ast.expr:
    """Return what an expression iterates over, without enumerate and tqdm around it."""
    while isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in _AROUND:
        node = node.args[0]
    return node


def _iterated(loop: ast.For) -> str:
    node = _peeled(loop.iter)
    return node.id if isinstance(node, ast.Name) else ""


def _calls(loop: ast.AST, functions: Mapping[str, ast.FunctionDef]) -> list[ast.Call]:
    calls = [one for one in _below(loop) if isinstance(one, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in functions]


def _given(call: ast.Call, function: ast.FunctionDef, name: str) -> str:
    """Return the name that a call passes for the parameter `name` of a function; "" if it passes no name."""
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if name not in parameters:
        return name if name and name not in _stored(function) else ""
    at = parameters.index(name)
    values = [call.args[at]] if at < len(call.args) else [one.value for one in call.keywords if one.arg == name]
    return values[0].id if values and isinstance(values[0], ast.Name) else ""


def _stored(node: ast.AST, before: int = sys.maxsize) -> set[str]:
    """Return the names that are assigned below a node, in lines before the line `before`."""
    names = [one for one in _below(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    return {one.id for one in names if one.lineno < before}


def _ends(loop: ast.For) -> Iterator[ast.stmt]:
    """Return the statements that leave a loop early."""
    waiting: list[ast.AST] = [*loop.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Break | ast.Return):
            yield node
        inside = isinstance(node, ast.For | ast.While)
        below = ast.iter_child_nodes(node)
        waiting += [one for one in below if not isinstance(one, ast.FunctionDef | ast.Lambda)] if not inside else []
        yield from (one for one in _below(node) if inside and isinstance(one, ast.Return))


def _uses(node: ast.AST, *, sure: bool) -> Iterator[tuple[str, str]]:
    """Yield how names are used, in the order of the source: ("reads", "sets", "may set" or "changes", name)."""
    sure = sure and not isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.IfExp | ast.BoolOp)
    parts = [*ast.iter_child_nodes(node)]
    match node:
        case ast.Name(ctx=ast.Load()):
            yield "reads", node.id
        case ast.Name():
            yield "sets" if sure else "may set", node.id
        case ast.AugAssign(target=ast.Name(id=name)):
            yield "reads", name
        case ast.Assign():
            parts = [node.value, *node.targets]
        case ast.For():
            parts = [node.iter, node.target, *node.body, *node.orelse]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp() | ast.Lambda() | ast.FunctionDef():
            inner = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            loads = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id not in inner]
            yield from (("reads", name) for name in loads)
            return
        case ast.Call(func=ast.Attribute(value=held)) if name := _root(held):
            yield "changes", name
        case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()) if name := _root(node):
            yield "changes", name
    for part in parts:
        yield from _uses(part, sure=sure)


def _root(node: ast.AST) -> str:
    """Return the name of the variable that holds the value of an expression: "history" for `history[0].losses`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _carried(loop: ast.For, known: set[str]) -> tuple[list[str], list[str]]:
    """Return which known names a loop sets for its next round, and which it changes in value."""
    first: dict[str, str] = {}
    changes: set[str] = set()
    sets: set[str] = set()
    for use, name in [use for statement in loop.body for use in _uses(statement, sure=True)]:
        if use == "changes":
            changes.add(name)
            continue
        first.setdefault(name, use)
        if use != "reads":
            sets.add(name)
    carried = {name for name in sets & known if first[name] != "sets"}
    return sorted(carried), sorted(changes & known - sets)


def _rewrite(tree: ast.Module, loop: TrainingLoop) -> None:
    """Insert the calls of the hook around the two loops, and after the backward pass."""
    known = _stored(loop.around, loop.epochs.lineno) | _parameters(loop.around)
    sets, changes = _carried(loop.epochs, known)
    names = ", ".join(sets)
    seen = sorted({*changes, *(_handed_on(loop.epochs) & known)})
    pairs = ", ".join(f"{name!r}: {name}" for name in seen)
    numbers = _peeled(loop.epochs.iter)
    begin = f"""
{HOOK}.sees({{**globals(), **locals()}}, {{{pairs}}}, {_of_functions(tree, loop.epochs)})
{loop.loader} = {HOOK}.begin({loop.loader}, {ast.unparse(numbers)}, {sets}, lambda: [{names}])
"""
    if sets:
        begin += f"[{names}] = {HOOK}.values\n"
    before = {id(loop.epochs): begin}
    _replace(loop.epochs, numbers, f"{HOOK}.epochs")
    inner = _stored(loop.within, loop.batches.lineno) | _parameters(loop.within)
    sums = sorted({name for names in _carried(loop.batches, inner) for name in names} & _stored(loop.within))
    if sums:
        names = ", ".join(sums)
        before[id(loop.batches)] = f"[{names}] = {HOOK}.within({sums}, lambda: [{names}])\n"
    counting = loop.batches.iter
    if isinstance(counting, ast.Call) and ast.unparse(counting.func) == "enumerate" and len(counting.args) == 1:
        counting.args.append(ast.parse(f"{HOOK}.batch", mode="eval").body)
    if isinstance(loop.around, ast.FunctionDef) and loop.loader not in known:
        loop.around.body.insert(0, ast.Global([loop.loader]))
    after = {id(one): f"{HOOK}.log({loss}={loss})\n" for one in _below(loop.batches) if (loss := _loss_of(one))}
    _insert(tree, before, after)
    ast.fix_missing_locations(tree)


def _handed_on(node: ast.AST) -> set[str]:
    """Return the names that are arguments of calls below a node: the called functions may change their values."""
    calls = [one for one in _below(node) if isinstance(one, ast.Call)]
    given = [one for call in calls for one in (*call.args, *(keyword.value for keyword in call.keywords))]
    return {one.id for one in given if isinstance(one, ast.Name)}


def _of_functions(tree: ast.Module, loop: ast.For) -> list[str]:
    """Return the global names set or changed by functions that a loop calls, directly or indirectly."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting: list[ast.AST] = [functions[ast.unparse(call.func)] for call in _calls(loop, functions)]
    reached: list[ast.AST] = []
    while waiting:
        if (function := waiting.pop()) not in reached:
            reached.append(function)
            waiting += [functions[ast.unparse(call.func)] for call in _calls(function, functions)]
    names: set[str] = set()
    for function in reached:
        declared = {name for one in _below(function) if isinstance(one, ast.Global) for name in one.names}
        uses = [use for one in ast.iter_child_nodes(function) for use in _uses(one, sure=True)]
        own = _stored(function) | _parameters(function)
        names |= {name for use, name in uses if name in declared or (use == "changes" and name not in own)}
        names |= _handed_on(function) - own - declared
    return sorted(names & _stored(tree))


def _parameters(scope: ast.AST) -> set[str]:
    arguments = scope.args if isinstance(scope, ast.FunctionDef) else None
    return {one.arg for one in ast.walk(arguments) if isinstance(one, ast.arg)} if arguments else set()


def _loss_of(node: ast.AST) -> str:
    """Return the name of the tensor whose gradients a statement computes; "" for any other statement."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return ""
    call = node.value
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "backward"):
        return ""
    candidates = [*call.args[:1], call.func.value, *getattr(call.func.value, "args", [])[:1]]
    return next((one.id for one in candidates if isinstance(one, ast.Name)), "")


def _replace(loop: ast.For, node: ast.expr, text: str) -> None:
    new = ast.parse(text, mode="eval").body
    if loop.iter is node:
        loop.iter = new
        return
    for call in ast.walk(loop.iter):
        if isinstance(call, ast.Call) and call.args and call.args[0] is node:
            call.args[0] = new


def _insert(node: ast.AST, before: Mapping[int, str], after: Mapping[int, str]) -> None:
    """Insert source before and after the statements with these identities, with the statements' line numbers."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            new: list[ast.stmt] = []
            for statement in value:
                new += _statements(before.get(id(statement), ""), statement)
                new.append(statement)
                new += _statements(after.get(id(statement), ""), statement)
            setattr(node, name, new)
    for child in ast.iter_child_nodes(node):
        _insert(child, before, after)


def _statements(text: str, at: ast.stmt) -> list[ast.stmt]:
    made = ast.parse(text).body
    for one in (node for statement in made for node in ast.walk(statement)):
        if isinstance(one, ast.stmt | ast.expr):
            one.lineno = one.end_lineno = at.lineno
    return made
