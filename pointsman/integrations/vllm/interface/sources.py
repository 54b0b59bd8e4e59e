"""Reads the sources of Python packages without importing them: modules, names across re-exports, classes with their
members, and signatures.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Imported:
    """A name that a module imports."""

    module: str
    name: str | None
    """Name within `module`; None: the module itself is imported."""


@dataclass(frozen=True, slots=True)
class External:
    """An object outside of the packages whose sources are read, or in a file that cannot be read. Nothing is known
    about such an object."""

    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: Class | None = None

    @property
    def name(self) -> str:
        return f"{self.owner.name}.{self.node.name}" if self.owner is not None else self.node.name

    @property
    def decorators(self) -> set[str]:
        """The decorators' names without the modules before them: "b" of `@a.b`."""
        return {_last_name(each) for each in self.node.decorator_list}


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a module."""

    module: Module
    node: ast.Assign | ast.AnnAssign


class Module:
    """A parsed module. If a name has several definitions, the first is used, because type checkers use it."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name = name
        self.path = path
        self.tree = ast.parse(text)
        self.names: dict[str, ast.stmt | Imported] = {}
        self.runtime: set[str] = set()
        """Names that exist at run time; other names exist only for type checkers."""
        self.stars: list[str] = []
        """Modules imported with `*`."""
        for node, for_types_alone in _bindings(self.tree.body):
            self._bind(node, for_types_alone)

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def _bind(self, node: ast.stmt, for_types_alone: bool) -> None:
        found: list[tuple[str, ast.stmt | Imported]] = []
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    self.stars.append(self.absolute_name(node))
                else:
                    found.append((alias.asname or alias.name, Imported(self.absolute_name(node), alias.name)))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found.append((alias.asname or top, Imported(alias.name if alias.asname else top, None)))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found += [(name, node) for name in _assigned(node)]
        for name, what in found:
            before = self.names.setdefault(name, what)
            if isinstance(before, ast.FunctionDef) and "overload" in {_last_name(d) for d in before.decorator_list}:
                self.names[name] = what
            if not for_types_alone:
                self.runtime.add(name)

    def absolute_name(self, node: ast.ImportFrom) -> str:
        """The absolute name of an import's module."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, node.module] if node.module else parts)

    @cached_property
    def lazy_names(self) -> dict[str, Imported]:
        """Names that the module's `__getattr__` imports, by name; read from a dictionary "name": "module:name" in the
        module."""
        found: dict[str, Imported] = {}
        if "__getattr__" not in self.names:
            return found
        for table in ast.walk(self.tree):
            if not isinstance(table, ast.Dict):
                continue
            for key, value in zip(table.keys, table.values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(value, ast.Constant)):
                    continue
                module, colon, name = str(value.value).partition(":")
                if colon:
                    found[str(key.value)] = Imported(self.package + module if module[0] == "." else module, name)
        return found


Definition = Module | Function | Variable | External
"""What a name may refer to; `Class`, which is defined below, is a further kind."""


@dataclass(frozen=True, slots=True)
class Member:
    """A named member of a class."""

    owner: Class
    name: str
    node: ast.stmt
    method: Function | None = None
    """For an attribute of `self`: the method that assigns the attribute. For a method or property: the function that
    defines it."""

    @property
    def function(self) -> Function | None:
        """The method or property; None: the member is neither."""
        return self.method if self.method is not None and self.node is self.method.node else None

    @property
    def is_property(self) -> bool:
        return self.function is not None and bool(self.function.decorators & {"property", "cached_property"})

    @property
    def is_abstract(self) -> bool:
        return self.function is not None and "abstractmethod" in self.function.decorators


_PLAIN = {
    "object": (),
    "ABC": (),
    "Generic": (),
    "Protocol": (),
    "Struct": ("__struct_fields__",),
    "BaseModel": ("model_dump", "model_copy"),
    "NamedTuple": ("_asdict", "_replace", "_fields", "count", "index"),
    "Enum": ("name", "value"),
    "IntEnum": ("name", "value", "bit_count", "to_bytes"),
    "StrEnum": ("name", "value"),
}
"""Base classes outside of the packages that add no fields, each with the members that it adds."""
_ENUMS = {"Enum", "IntEnum", "StrEnum"}


class Class:
    """A class, whose bases may be in other modules.

    Args:
        sources: the sources in which the bases are resolved.
        module: module that defines the class.
        node: syntax node of the definition.
        bases: the bases, if they cannot be resolved by their names in the module.
    """

    def __init__(
        self, sources: Sources, module: Module, node: ast.ClassDef, bases: Iterable[Class | External] | None = None
    ) -> None:
        self.module = module
        self.node = node
        self.name = node.name
        self._sources = sources
        self._bases = None if bases is None else tuple(bases)

    def __repr__(self) -> str:
        return f"{self.module.name}.{self.name}"

    @cached_property
    def bases(self) -> tuple[Class | External, ...]:
        if self._bases is not None:
            return self._bases
        found: list[Class | External] = []
        for base in self.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            what = self._sources.resolve(self.module, base)
            found.append(what if isinstance(what, Class) else External(_last_name(base)))
        return tuple(found)

    @cached_property
    def lineage(self) -> tuple[Class, ...]:
        """The class and its bases within the packages, in the order of attribute lookup."""
        found: dict[Class, None] = {}
        for base in reversed(self.bases):
            if isinstance(base, Class):
                found = {**dict.fromkeys(base.lineage), **{k: None for k in found if k not in base.lineage}}
        return (self, *found)

    @cached_property
    def external_bases(self) -> frozenset[str]:
        """Names of the base classes about which nothing is known."""
        return frozenset(base.name for each in self.lineage for base in each.bases if isinstance(base, External))

    @cached_property
    def is_open(self) -> bool:
        """Whether the class may have members that the sources do not show."""
        return bool(self.external_bases - _PLAIN.keys()) or self.member("__getattr__") is not None

    @cached_property
    def own_members(self) -> Mapping[str, Member]:
        found: dict[str, Member] = {}
        methods: list[Function] = []
        for node, _ in _bindings(self.node.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                method = Function(self.module, node, self)
                methods.append(method)
                if not method.decorators & {"setter", "overload"}:
                    found.setdefault(node.name, Member(self, node.name, node, method))
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for name in _assigned(node):
                    found.setdefault(name, Member(self, name, node))
            elif isinstance(node, ast.ClassDef):
                found.setdefault(node.name, Member(self, node.name, node))
        for method in methods:
            for name, assignment in assigned_to_self(method.node):
                before = found.get(name)
                if before is None or (isinstance(assignment, ast.AnnAssign) and isinstance(before.node, ast.Assign)):
                    found[name] = Member(self, name, assignment, method)
        return found

    def member(self, name: str) -> Member | None:
        for each in self.lineage:
            if name in each.own_members:
                return each.own_members[name]
        return None

    def has_attribute(self, name: str) -> bool | None:
        """Whether instances of the class have an attribute; None: unknown."""
        if self.member(name) is not None or name in dir(object):
            return True
        if any(name in _PLAIN.get(base, ()) for base in self.external_bases):
            return True
        return None if self.is_open else False

    def member_names(self) -> set[str]:
        return {name for each in self.lineage for name in each.own_members}

    # ------------------------------------------------------------------ construction

    @cached_property
    def is_record(self) -> bool:
        """Whether the annotated names in the class body are the arguments of its constructor (as in a dataclass)."""
        kinds = {_last_name(each) for known in self.lineage for each in known.node.decorator_list}
        return bool(kinds & {"dataclass", "config"} or self.external_bases & {"NamedTuple", "Struct", "BaseModel"})

    @cached_property
    def fields(self) -> Mapping[str, Parameter]:
        """The arguments of a record's constructor, in order."""
        found: dict[str, Parameter] = {}
        for each in reversed(self.lineage):
            is_named = _is_keyword_only(each.node)
            for node, _ in _bindings(each.node.body):
                if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                    continue
                kind = ast.unparse(node.annotation)
                if "ClassVar" in kind:
                    continue
                if kind.endswith("KW_ONLY"):
                    is_named = True
                    continue
                options = _field_options(node.value)
                if options.get("init") is False:
                    found.pop(node.target.id, None)
                    continue
                name, by_keyword = node.target.id, bool(options.get("kw_only", is_named))
                found[name] = Parameter(name, _has_default(node.value), by_keyword)
        return found

    @cached_property
    def constructor(self) -> Signature | None:
        """The signature of the class's constructor; None: unknown."""
        for each in self.lineage:
            made = each.own_members.get("__init__") or each.own_members.get("__new__")
            if made is not None and made.function is not None:
                return Signature.of(made.function.node, bound=True)
            if each.is_record:
                return Signature(list(self.fields.values()))
        if self.external_bases & _ENUMS:  # an enum: its constructor looks up a member by value
            return Signature([Parameter("value", has_default=False)])
        return None if self.is_open or self.external_bases - {"object", "ABC"} else Signature([])


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a function."""

    name: str
    has_default: bool
    is_keyword_only: bool = False
    is_positional_only: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call."""

    num_positional: int
    keywords: frozenset[str]
    has_more_positional: bool = False
    """Whether the call has an argument `*values`."""
    has_more_keywords: bool = False
    """Whether the call has an argument `**values`."""

    @staticmethod
    def of(node: ast.Call) -> Arguments:
        return Arguments(
            sum(not isinstance(each, ast.Starred) for each in node.args),
            frozenset(each.arg for each in node.keywords if each.arg is not None),
            any(isinstance(each, ast.Starred) for each in node.args),
            any(each.arg is None for each in node.keywords),
        )

    def __str__(self) -> str:
        parts = ["_"] * self.num_positional + ["*_"] * self.has_more_positional
        names = sorted(self.keywords)
        parts += [f"{name}=" for name in names[:3]] + ["..."] * (len(names) > 3) + ["**_"] * self.has_more_keywords
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that a function or a constructor accepts."""

    parameters: list[Parameter]
    takes_more_positional: bool = False
    takes_more_keywords: bool = False

    @staticmethod
    def of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> Signature:
        """The signature of a function; `bound`: leave out its first argument."""
        given = node.args
        before = [*given.posonlyargs, *given.args]
        num_required = len(before) - len(given.defaults)
        parameters = [
            Parameter(each.arg, at >= num_required, is_positional_only=at < len(given.posonlyargs))
            for at, each in enumerate(before)
        ]
        if bound:
            del parameters[:1]
        parameters += [
            Parameter(each.arg, default is not None, is_keyword_only=True)
            for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        ]
        return Signature(parameters, given.vararg is not None, given.kwarg is not None)

    def call_problem(self, given: Arguments) -> str | None:
        """Why a call with these arguments fails; None: it succeeds."""
        by_place = [each for each in self.parameters if not each.is_keyword_only]
        if given.num_positional > len(by_place) and not self.takes_more_positional:
            return f"takes {len(by_place)} arguments by place, and not {given.num_positional}"
        names = {each.name for each in self.parameters if not each.is_positional_only}
        if (unknown := given.keywords - names) and not self.takes_more_keywords:
            return f"does not take {', '.join(sorted(unknown))}"
        placed = {each.name for each in by_place[: given.num_positional]}
        if twice := placed & given.keywords:
            return f"takes {', '.join(sorted(twice))} by place here"
        missing = [
            each.name
            for each in self.parameters
            if not (each.has_default or each.name in placed or each.name in given.keywords)
            and not (given.has_more_keywords and not each.is_positional_only)
            and not (given.has_more_positional and not each.is_keyword_only)
        ]
        return f"requires {', '.join(missing)} too" if missing else None

    def __str__(self) -> str:
        shown, starred = [], self.takes_more_positional
        if starred:
            shown.append("*")
        for each in self.parameters:
            if each.is_keyword_only and not starred:
                shown.append("*")
                starred = True
            shown.append(f"{each.name}=" if each.has_default else each.name)
        return f"({', '.join(shown + ['**'] * self.takes_more_keywords)})"


@dataclass
class Sources:
    """The modules of packages, each read on first use.

    Args:
        packages: folder of each package, by the package's name.
    """

    packages: Mapping[str, Path]
    _modules: dict[str, Module | External | None] = field(default_factory=dict)
    _classes: dict[ast.ClassDef, Class] = field(default_factory=dict)

    def module(self, name: str) -> Module | External | None:
        """The module called `name`, parsed; None: the packages lack it."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | External | None:
        top, *rest = name.split(".")
        if top not in self.packages:
            return External(name)
        base = self.packages[top].joinpath(*rest)
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if path.is_file():
                try:
                    return Module(name, path, path.read_text(encoding="utf-8"))
                except (SyntaxError, UnicodeDecodeError):  # the source is for a newer Python
                    return External(name)
        is_compiled = rest and base.parent.is_dir() and any(base.parent.glob(f"{base.name}.*"))
        return External(name) if base.is_dir() or is_compiled else None

    def modules_under(self, name: str, word: str = "") -> Iterator[Module]:
        """The modules below a package, in order; with `word`, only modules whose text contains this word."""
        top, *rest = name.split(".")
        folder = self.packages[top]
        for path in sorted(folder.joinpath(*rest).rglob("*.py")):
            if word and not re.search(rf"\b{word}\b", path.read_text(encoding="utf-8", errors="replace")):
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            found = self.module(".".join([top, *(parts[:-1] if parts[-1] == "__init__" else parts)]))
            if isinstance(found, Module):
                yield found

    def class_of(self, module: Module, node: ast.ClassDef, bases: Iterable[Class | External] | None = None) -> Class:
        if node not in self._classes:
            self._classes[node] = Class(self, module, node, bases)
        return self._classes[node]

    def find(self, module: Module, name: str, *, at_runtime: bool = False) -> Definition | Class | None:
        """The definition of a name in a module; None: there is none.

        Args:
            at_runtime: whether to ignore definitions that only type checkers see.
        """
        return self._find(module, name, at_runtime, frozenset())

    def _find(
        self, module: Module, name: str, at_runtime: bool, seen: frozenset[tuple[str, str]]
    ) -> Definition | Class | None:
        if (module.name, name) in seen:
            return External(f"{module.name}.{name}")
        seen = seen | {(module.name, name)}
        what = module.names.get(name)
        if name in module.lazy_names:
            what = module.lazy_names[name]
        elif at_runtime and name not in module.runtime:
            what = None
        if isinstance(what, Imported):
            return self._imported(what, at_runtime, seen)
        if isinstance(what, ast.ClassDef):
            return self.class_of(module, what)
        if isinstance(what, ast.FunctionDef | ast.AsyncFunctionDef):
            return Function(module, what)
        if isinstance(what, ast.Assign | ast.AnnAssign):
            return Variable(module, what)
        for star in module.stars:
            other = self.module(star)
            found = self._find(other, name, at_runtime, seen) if isinstance(other, Module) else other
            if found is not None:
                return found
        if module.path.name == "__init__.py":
            inner = self.module(f"{module.name}.{name}")
            if inner is not None:
                return inner
        otherwise = module.names.get("__getattr__")
        if otherwise is None or module.lazy_names:
            return None
        knows = isinstance(otherwise, ast.FunctionDef) and any(
            isinstance(each, ast.Constant) and each.value == name for each in ast.walk(otherwise)
        )
        return (
            self._find(module, name, False, seen - {(module.name, name)})
            if knows and at_runtime
            else External(f"{module.name}.{name}")
        )

    def _imported(
        self, what: Imported, at_runtime: bool, seen: frozenset[tuple[str, str]]
    ) -> Definition | Class | None:
        target = self.module(what.module)
        if what.name is None or not isinstance(target, Module):
            return target if what.name is None or target is None else External(f"{what.module}.{what.name}")
        return self._find(target, what.name, at_runtime, seen)

    def resolve(self, module: Module, node: ast.expr) -> Definition | Class | None:
        """The definition to which a name with dots refers in a module; None: unknown."""
        if isinstance(node, ast.Name):
            return self.find(module, node.id)
        if isinstance(node, ast.Attribute):
            value = self.resolve(module, node.value)
            if isinstance(value, Module):
                return self.find(value, node.attr)
            if isinstance(value, External):
                return External(f"{value.name}.{node.attr}")
        return None

    def modules_defining(self, package: str, name: str) -> list[str]:
        """The modules of a package that define a class or function of this name. Searches the text of all modules."""
        folder = self.packages[package]
        definition = re.compile(rf"^(class|def|async def) {re.escape(name)}\b", re.MULTILINE)
        return [
            ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            for path in sorted(folder.rglob("*.py"))
            if definition.search(path.read_text(encoding="utf-8", errors="replace"))
        ]


# ---------------------------------------------------------------------- of the syntax


def _last_name(node: ast.expr) -> str:
    """The last name of an expression: "b" of `a.b(c)`."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_for_types(node: ast.If) -> bool:
    """Whether the statement is `if TYPE_CHECKING`."""
    return _last_name(node.test) == "TYPE_CHECKING"


def _bindings(body: list[ast.stmt], for_types_alone: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements of a body, including the statements in branches; with each, whether only type checkers see
    it."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _bindings(node.body, for_types_alone or is_for_types(node))
            yield from _bindings(node.orelse, for_types_alone)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(each.body for each in node.handlers), node.orelse, node.finalbody):
                yield from _bindings(part, for_types_alone)
        elif isinstance(node, ast.With | ast.For | ast.While):
            yield from _bindings(node.body, for_types_alone)
        else:
            yield node, for_types_alone


def _assigned(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(each, ast.Name):
                yield each.id


def assigned_to_self(
    method: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    arguments = [*method.args.posonlyargs, *method.args.args]
    if not arguments:
        return
    first = arguments[0].arg
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == first:
                    yield each.attr, node


def _field_options(value: ast.expr | None) -> dict[str, object]:
    """The keyword arguments with constant values in a field's value, such as `init` in `field(init=False)`."""
    if not isinstance(value, ast.Call):
        return {}
    return {each.arg: each.value.value for each in value.keywords if each.arg and isinstance(each.value, ast.Constant)}


def _has_default(value: ast.expr | None) -> bool:
    if not (isinstance(value, ast.Call) and _last_name(value) in ("field", "Field")):
        return value is not None
    first = value.args[0] if value.args else None
    is_given = first is not None and not (isinstance(first, ast.Constant) and first.value is Ellipsis)
    return is_given or any(each.arg in ("default", "default_factory") for each in value.keywords)


def _is_keyword_only(node: ast.ClassDef) -> bool:
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
    keywords = [*node.keywords, *(keyword for each in calls for keyword in each.keywords)]
    return any(
        each.arg == "kw_only" and isinstance(each.value, ast.Constant) and each.value.value is True for each in keywords
    )
