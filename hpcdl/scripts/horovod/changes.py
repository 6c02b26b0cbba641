"""Find what must change in a Horovod script, line by line. It reads the syntax tree and runs nothing of it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hpcdl
from hpcdl.core.errors import UsageError
from hpcdl.scripts.horovod import names

_OPTIMIZER = re.compile(r"(^|_)opt(imizer)?s?\d*$")
"""Names that scripts usually give to optimizers, used if nothing else identifies them."""
_LONGEST = 100
_TF1 = "tensorflow.compat.v1"
_NO_ARGUMENT = "leave it out: hpcdl's has no such argument"


@dataclass(frozen=True, kw_only=True, order=True)
class Change:
    """One place in a script, its first and last line, and its replacement."""

    line: int
    last: int
    found: str
    instead: str

    def __str__(self) -> str:
        lines = f"{self.line}" if self.line == self.last else f"{self.line}-{self.last}"
        return f"{lines}: {self.found}\n    -> {self.instead}"


def changes_in(path: Path) -> list[Change]:
    """Return the remaining changes that the script `path` needs, in line order.

    Raises UsageError if it is not Python, or if it imports neither Horovod nor hpcdl.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    script = _Script(tree, path.parent)
    script.visit(tree)
    if not script.moves:
        raise UsageError(f"{path} imports neither horovod nor hpcdl; name the file that does")
    return sorted(script.changes)


class _Script(ast.NodeVisitor):
    """Visits every name, call and import once. It does not look into code that is to be removed as a whole."""

    def __init__(self, tree: ast.Module, folder: Path) -> None:
        self.changes: set[Change] = set()
        self.moves = False
        """Whether anything of Horovod or hpcdl is imported."""
        self._folder = folder
        self._origins: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._alias = "hvd"
        # All names first: a function may use what a later line of the script defines.
        for node in ast.walk(tree):
            self._note(node)
        self._schedules = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and self._called(node.func) == names.SCHEDULE
        ]

    def _note(self, node: ast.AST) -> None:
        """Record what a name stands for: imports, optimizers, elastic states, configurations of sessions."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name if alias.asname else alias.name.partition(".")[0]
                self._origins[alias.asname or root] = root
                if alias.asname and (alias.name == "hpcdl" or alias.name in names.MODULES):
                    self._alias = alias.asname
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self._origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" in names.MODULES:
                    self._alias = alias.asname or alias.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = self._called(node.value.func)
            for target in node.targets:
                self._kinds[ast.unparse(target)] = called

    def _origin(self, node: ast.AST) -> str:
        """Return the full name that an expression of names and dots stands for; empty for other expressions."""
        if isinstance(node, ast.Name):
            return self._origins.get(node.id, "")
        if isinstance(node, ast.Attribute):
            inner = self._origin(node.value)
            return f"{inner}.{node.attr}" if inner else ""
        return ""

    def _called(self, node: ast.AST) -> str:
        return _common(self._origin(node))

    def _add(self, node: ast.AST, instead: str, source: str = "") -> None:
        first: int = getattr(node, "lineno", 1)
        last: int = getattr(node, "end_lineno", None) or first
        text = source or " ".join(ast.unparse(node).split())
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
        replacement = re.sub(r"\bhvd\b", self._alias, instead)
        self.changes.add(Change(line=first, last=last, found=text, instead=replacement))

    # Imports

    def visit_Import(self, node: ast.Import) -> None:
        """Check `import a.b as c`."""
        for alias in node.names:
            self._import(
                node, alias.name, f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else ""), alias.asname
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Check `from a.b import c, d`."""
        module = node.module or ""
        if node.level or not module:
            self._beside(node, [module or alias.name for alias in node.names])
            return
        for alias in node.names:
            full_name = f"{module}.{alias.name}"
            text = f"from {module} import {alias.name}"
            if module in names.MODULES and full_name not in names.MODULES:
                self.moves = True
                self._imported(node, alias.name, text)
            else:
                self._import(node, full_name, text, alias.asname or alias.name, module)

    def _import(self, node: ast.stmt, name: str, text: str, alias: str | None, module: str = "") -> None:
        package = name.partition(".")[0]
        self.moves = self.moves or package in ("horovod", "hpcdl")
        if name in names.MODULES:
            as_alias = "" if (alias or "hpcdl") == "hpcdl" else f" as {alias}"
            self._add(node, f"import hpcdl{as_alias}", text)
        elif package == "horovod":
            self._add(node, _longest(names.REFUSED, name)[1], text)
        elif package == "hpcdl" and module == "hpcdl":
            self._imported(node, name.removeprefix("hpcdl."), text)
        elif name == _TF1:
            self._origins[alias or "tensorflow"] = "tensorflow"
            self._add(node, f"import tensorflow as {alias or 'tf'}", text)
        elif (removed := _gone(name)) is not None:
            self._add(node, _import_of(_typed(removed, name), alias if module else None), text)
        else:
            self._beside(node, [module or name])

    def _imported(self, node: ast.stmt, name: str, text: str) -> None:
        """Check a name that is imported from a Horovod module or from hpcdl."""
        replacement = _longest(names.HOROVOD, f"hvd.{name}")[1]
        if name in hpcdl.__all__ and name != "callbacks":
            if not text.startswith("from hpcdl "):
                self._add(node, f"from hpcdl import {name}", text)
        elif name in ("callbacks", "elastic", "*"):
            if not text.startswith("from hpcdl "):
                self._add(node, "import hpcdl as hvd", text)
        else:
            self._add(node, replacement or "leave it out: hpcdl has no such name", text)

    def _beside(self, node: ast.stmt, modules: Sequence[str]) -> None:
        """Report the script's own modules that import Horovod as well: they must be checked too."""
        for name in modules:
            path = self._folder / f"{name.replace('.', '/')}.py"
            if path.is_file() and re.search(rb"^\s*(import|from)\s+horovod\b", path.read_bytes(), re.MULTILINE):
                self._add(node, f"{path.name} imports Horovod too: hpcdl run --from-horovod {path} --check")

    # Statements

    def visit_If(self, node: ast.If) -> None:
        """Report an `if` that only chooses a GPU: it is to be removed as a whole."""
        calls = [
            statement.value
            for statement in node.body
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        ]
        if len(calls) == len(node.body) and all(self._called(statement.func) in names.PINNING for statement in calls):
            text = " ".join(ast.unparse(node).split())
            self._add(node, names.NO_PINNING, text)
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Check attributes of a session's configuration, and environment variables."""
        target = node.targets[0]
        base = target
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(target, ast.Attribute) and self._kinds.get(ast.unparse(base), "").endswith(".ConfigProto"):
            self._add(node, names.REMOVED["tensorflow.ConfigProto"])
            return
        if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ"):
            variable = target.slice.value if isinstance(target.slice, ast.Constant) else None
            if variable in names.VARIABLES:
                self._add(node, names.VARIABLES[str(variable)])
                return
        self.generic_visit(node)

    # Expressions

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Check `a.b.c`, the longest chain first."""
        if self._name(node, self._origin(node)):
            return
        if self._is_optimizer(node.value) and node.attr in names.OPTIMIZER_MEMBERS:
            instead = names.OPTIMIZER_MEMBERS[node.attr]
            base = ast.unparse(node.value)
            self._add(node, f"{base}.{instead}" if instead.isidentifier() else instead)
        elif node.attr in names.METHODS:
            self._add(node, f"{ast.unparse(node.value)}.{names.METHODS[node.attr]}")
            self.visit(node.value)
        else:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        """Check a name that was imported by itself."""
        if "." in self._origins.get(node.id, ""):
            self._name(node, self._origin(node), reported_at_import=True)

    def _name(self, node: ast.expr, origin: str, *, reported_at_import: bool = False) -> bool:
        """Check a full name. Return whether its parts need no further check."""
        if not origin:
            return False
        full_name = _common(origin)
        if full_name.startswith("hvd."):
            if not reported_at_import:
                self._of_horovod(node, full_name)
            return True
        if full_name.startswith("horovod"):
            if not full_name.startswith(names.NOT_MOVED):  # reported at their import
                self._add(node, _longest(names.REFUSED, full_name)[1])
            return True
        removed = _gone(origin)
        if removed is not None and not reported_at_import:
            self._add(node, _typed(removed, origin))
        return removed is not None

    def _of_horovod(self, node: ast.expr, whole: str) -> None:
        """Report a Horovod name that hpcdl lacks."""
        _, instead = _longest(names.HOROVOD, whole)
        first = whole.split(".")[1]
        if instead:
            self._add(node, instead)
        elif first not in hpcdl.__all__ or whole.startswith("hvd.callbacks."):
            self._add(node, "leave it out: hpcdl has no such name (docs/reference/horovod.md)")

    def _is_optimizer(self, node: ast.expr) -> bool:
        """Return whether an expression is an optimizer, by its origin or by its name."""
        text = ast.unparse(node)
        kind = self._kinds.get(text, "")
        made = kind.startswith("keras.optimizers.") or kind == "hvd.DistributedOptimizer"
        named = isinstance(node, ast.Name | ast.Attribute) and _OPTIMIZER.search(text.rpartition(".")[2]) is not None
        return made or (named and not self._origin(node))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Report a choice of GPU by local rank: each rank sees its own GPU only."""
        if self._is_local_rank(node.slice) and "gpu" in ast.unparse(node.value).lower():
            self._add(node, f"{ast.unparse(node.value)}[0]: hvd.init() shows each rank its own GPU alone")
        else:
            self.generic_visit(node)

    def _is_local_rank(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and self._called(node.func) == "hvd.local_rank"

    def visit_Call(self, node: ast.Call) -> None:
        """Check what is called, and its arguments."""
        called = self._called(node.func)
        on_device = called == "tensorflow.device" and any(map(self._is_local_rank, ast.walk(node)))
        if called in names.PINNING or on_device:
            self._add(node, names.NO_PINNING)
            return
        removed = _gone(self._origin(node.func)) if called else None
        if removed is not None and removed[1].startswith("leave it out"):
            self._add(node, removed[1])
            return
        if self._whole_call(node, called):
            return
        handled = self._arguments(node, called)
        self.visit(node.func)
        for child in (*node.args, *(word.value for word in node.keywords if word not in handled)):
            self.visit(child)

    def _whole_call(self, node: ast.Call, called: str) -> bool:
        """Report a call that is replaced as a whole. Return whether it was one."""
        keywords = {one.arg: ast.unparse(one.value) for one in node.keywords if one.arg}
        arguments = [ast.unparse(one) for one in node.args]
        if called == names.WARM_UP:
            self._add(node, _warm_up(arguments, keywords))
        elif called == names.SCHEDULE:
            self._add(node, self._schedule(node))
        elif (instead := names.HOROVOD.get(called)) is not None:
            if not (called.startswith(("hvd.callbacks.", "hvd.elastic.")) or "(" in instead or " " in instead):
                return False
            text = f"{instead}({', '.join([*arguments, *(f'{key}={one}' for key, one in keywords.items())])})"
            state = f"({arguments[0] if arguments else 'state'})"
            self._add(node, text if called in names.STATES else instead.replace("(state)", state))
        elif called in ("keras.backend.set_value", "keras.backend.get_value"):
            return self._backend_value(node, called)
        elif (
            isinstance(node.func, ast.Attribute)
            and self._is_optimizer(node.func.value)
            and node.func.attr == "variables"
        ):
            self._add(node, f"{ast.unparse(node.func)}: it is no function in Keras 3")
        elif (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in names.STATE_METHODS
            and self._is_state(node.func.value)
        ):
            self._add(node, names.STATE_METHODS[node.func.attr])
        else:
            return False
        return True

    def _is_state(self, node: ast.expr) -> bool:
        return self._kinds.get(ast.unparse(node), "").startswith(("hvd.elastic.", "hvd.State"))

    def _backend_value(self, node: ast.Call, called: str) -> bool:
        """Report K.set_value or K.get_value of a learning rate or another variable. Return whether it is done."""
        variable = node.args[0] if node.args else node
        for argument in node.args[1:]:
            self.visit(argument)
        of_rate = isinstance(variable, ast.Attribute) and variable.attr in ("lr", "learning_rate")
        if of_rate and isinstance(variable, ast.Attribute):
            rate = f"{ast.unparse(variable.value)}.learning_rate"
            setting = called.endswith("set_value") and len(node.args) == 2
            self._add(node, f"{rate} = {ast.unparse(node.args[1])}" if setting else f"float({rate})")
            return True
        if self._origin(node.func).startswith("tensorflow."):
            return False
        text = ast.unparse(variable)
        setting = called.endswith("set_value") and len(node.args) == 2
        self._add(
            node, f"{text}.assign({ast.unparse(node.args[1])})" if setting else f"keras.ops.convert_to_numpy({text})"
        )
        return True

    def _schedule(self, node: ast.Call) -> str:
        """Return the one hpcdl callback that replaces all LearningRateScheduleCallbacks of a script."""
        if node is not self._schedules[0]:
            return f"leave it out: the one on line {self._schedules[0].lineno} holds it"
        rows = [_stage(call) for call in self._schedules]
        initial = next((rate for *_, rate in rows if rate), "")
        stages = " else ".join(f"{factor} if {when}" for when, factor, _ in rows)
        rate = f", initial_rate={initial}" if initial else ""
        return f"hvd.learning_rate_schedule(lambda epochs: {stages} else 1.0{rate})"

    def _arguments(self, node: ast.Call, called: str) -> list[ast.keyword]:
        """Report removed arguments. Return those that need no further check."""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        replacements: Mapping[str, str] = names.CALLBACK_ARGUMENTS.get(called, {})
        if called.startswith("keras.optimizers."):
            replacements = names.OPTIMIZER_ARGUMENTS
        elif called.startswith("keras.layers."):
            replacements = names.LAYER_ARGUMENTS
        elif not called.startswith(("hvd.", "keras.", "tensorflow.")) and method in names.METHOD_ARGUMENTS:
            replacements = names.METHOD_ARGUMENTS[method]
        handled = []
        for keyword in node.keywords:
            instead = replacements.get(keyword.arg or "")
            if instead is not None:
                self._argument(keyword, instead)
                handled += [keyword] if instead.startswith("leave") else []
        if called.startswith("hvd."):
            handled += self._arguments_of_horovod(node, called)
        elif called == "keras.callbacks.ModelCheckpoint":
            self._file_name(node)
        elif method in ("save", "save_weights") and called == "":
            self._saved_name(node, method)
        return handled

    def _argument(self, keyword: ast.keyword, instead: str) -> None:
        value = ast.unparse(keyword.value)
        self._add(keyword, f"{instead}{value}" if instead.endswith("=") else instead, f"{keyword.arg}={value}")

    def _arguments_of_horovod(self, node: ast.Call, called: str) -> list[ast.keyword]:
        """Report arguments that hpcdl's function of the same name lacks."""
        name = called.removeprefix("hvd.")
        if name not in hpcdl.__all__ or name in ("callbacks", "data"):
            return []
        accepted, most, open_ended = _signature(name)
        if name == "init":
            if node.args or not {keyword.arg for keyword in node.keywords} <= accepted:
                self._add(node, "hvd.init(): it takes all ranks of the launcher")
            return []
        handled = []
        for keyword in node.keywords:
            instead = names.ARGUMENTS.get((called, keyword.arg or ""), "" if open_ended else _NO_ARGUMENT)
            if keyword.arg is None or keyword.arg in accepted or not instead:
                continue
            if keyword.arg == "average":
                averages = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                instead = "op=hvd.Average" if averages else "op=hvd.Sum"
            elif keyword.arg == "compression":
                value = self._called(keyword.value)
                instead = {"hvd.Compression.fp16": 'compress="fp16"', "hvd.Compression.none": "leave it out"}.get(
                    value, instead
                )
            self._argument(keyword, instead)
            handled += [keyword] if instead != "compress=" else []
        for index, word in enumerate(node.args):
            if index >= most or (index == 1 and name == "allreduce" and isinstance(word, ast.Constant)):
                self._add(word, "name the argument, or leave it out: hpcdl's takes no such one by its place")
        return handled

    def _file_name(self, node: ast.Call) -> None:
        """Check the file name of ModelCheckpoint, if it is a constant."""
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        path = node.args[0] if node.args else keywords.get("filepath")
        weights = keywords.get("save_weights_only")
        only = isinstance(weights, ast.Constant) and weights.value is True
        suffixes = (".weights.h5",) if only else (".keras", ".h5")
        if isinstance(path, ast.Constant) and isinstance(path.value, str) and not path.value.endswith(suffixes):
            self._add(path, f"a name that ends in {' or '.join(suffixes)}")

    def _saved_name(self, node: ast.Call, method: str) -> None:
        """Check the file name of model.save and model.save_weights, if it is a constant."""
        suffixes = (".weights.h5",) if method == "save_weights" else (".keras", ".h5")
        path = node.args[0] if node.args else None
        model = ast.unparse(node.func).rpartition(".")[0]
        if not isinstance(path, ast.Constant) or not isinstance(path.value, str) or path.value.endswith(suffixes):
            return
        if method == "save_weights" or "model" in model.lower():
            self._add(path, f"a name that ends in {' or '.join(suffixes)}")


def _common(origin: str) -> str:
    """Return a full name in the form that the tables use."""
    origin = origin.replace(_TF1, "tensorflow", 1)
    for module in (*names.MODULES, "hpcdl"):
        if origin.startswith(f"{module}."):
            return f"hvd{origin.removeprefix(module)}"
    for module, prefix in (("tensorflow.keras", "keras"), ("tensorflow.optimizers", "keras.optimizers")):
        if origin == module or origin.startswith(f"{module}."):
            return prefix + origin.removeprefix(module)
    return origin


def _gone(origin: str) -> tuple[str, str] | None:
    """Return the part of a name that TensorFlow 2 and Keras 3 lack, and its replacement; None if they have it."""
    full_name = _common(origin)
    if origin.startswith(f"{_TF1}.") and full_name.split(".")[1] in names.LEFT_IN_VERSION_1:
        return None
    part, instead = _longest(names.REMOVED, full_name)
    if part:
        return part, instead
    if not origin.startswith("tensorflow."):
        part, instead = _longest(names.STILL_IN_TF_KERAS, full_name)
        if part:
            return part, instead
        if full_name.startswith(f"{names.BACKEND}."):
            name = full_name.split(".")[2]
            return None if name in names.LEFT_IN_BACKEND else (f"{names.BACKEND}.{name}", f"keras.ops.{name}")
    if origin.startswith(f"{_TF1}.") and not full_name.startswith("keras"):
        return full_name, names.VERSION_1
    return None


def _typed(gone: tuple[str, str], origin: str) -> str:
    """Return the replacement of a full name whose beginning has been removed."""
    removed, instead = gone
    suffix = _common(origin).removeprefix(removed)
    dotted = all(part.isidentifier() for part in instead.split("."))
    text = f"{instead}{suffix}" if dotted else instead
    return f"tf.{text}" if text.startswith("keras.") and origin.startswith("tensorflow.") else text


def _import_of(text: str, alias: str | None) -> str:
    """Return the import of a full name; any other text unchanged."""
    parts = text.split(".")
    if not all(part.isidentifier() for part in parts):
        return text
    if parts[0] == "tf":
        parts[0] = "tensorflow"
    if len(parts) == 1 or alias is None:
        return f"import {'.'.join(parts)}"
    as_alias = "" if parts[-1] == alias else f" as {alias}"
    return f"from {'.'.join(parts[:-1])} import {parts[-1]}{as_alias}"


def _longest(table: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the entry for `name` or its longest known prefix; empty texts if there is none."""
    parts = name.split(".")
    heads = (".".join(parts[:number]) for number in range(len(parts), 0, -1))
    prefix = next((head for head in heads if head in table), "")
    return prefix, table.get(prefix, "")


def _warm_up(words: Sequence[str], given: Mapping[str, str]) -> str:
    """Return the replacement of Horovod's warm-up callback `(initial_lr, warmup_epochs=5, ...)`."""
    rate = given.get("initial_lr", words[0] if words else "")
    epochs = given.get("warmup_epochs", words[1] if len(words) > 1 else "5")
    return f"hvd.learning_rate_warmup({epochs}{f', initial_rate={rate}' if rate else ''})"


def _stage(node: ast.Call) -> tuple[str, str, str]:
    """Return when a schedule applies, its factor, and the initial rate."""
    parameters = ("initial_lr", "multiplier", "start_epoch", "end_epoch", "staircase")
    arguments = dict(zip(parameters, map(ast.unparse, node.args), strict=False))
    arguments |= {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}
    factor, start, end = (
        arguments.get("multiplier", "1.0"),
        arguments.get("start_epoch", "0"),
        arguments.get("end_epoch", "None"),
    )
    try:
        factor = str(float(ast.literal_eval(factor)))
    except (ValueError, SyntaxError):
        called = f"({factor})" if "lambda" in factor else factor
        factor = f"{called}({'epochs' if arguments.get('staircase') == 'False' else 'int(epochs)'})"
    when = f"epochs >= {start}" if end == "None" else f"{start} <= epochs < {end}"
    return when, factor, arguments.get("initial_lr", "")


@functools.cache
def _signature(name: str) -> tuple[frozenset[str], int, bool]:
    """Return the arguments of a public name, the number of positional ones, and whether it takes any others.

    The source is read; nothing is imported.
    """
    module = importlib.util.find_spec(f"hpcdl.scripts.{vars(hpcdl)['_PUBLIC'][name]}")
    assert module is not None and module.origin is not None
    for node in ast.parse(Path(module.origin).read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            function, num_added = _function(node)
            positional = [argument.arg for argument in function.args.args][num_added:]
            named = frozenset([*positional, *(argument.arg for argument in function.args.kwonlyargs)])
            return named, len(positional), function.args.kwarg is not None
    return frozenset(), 0, True  # a constant, which is not called


def _function(node: ast.FunctionDef | ast.ClassDef) -> tuple[ast.FunctionDef, int]:
    """Return the function that is called, and the number of arguments that Python adds."""
    if isinstance(node, ast.FunctionDef):
        return node, 0
    methods: Iterator[ast.FunctionDef] = (
        member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == "__init__"
    )
    return next(methods), 1
