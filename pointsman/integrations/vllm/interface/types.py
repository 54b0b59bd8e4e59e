"""Infers types of expressions from annotations, constructors and assignments.

A type is a tuple of options: the value has one of these types. The type of None has no options; an unknown type has the
option `UNKNOWN`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pointsman.integrations.vllm.interface.sources import (
    Class,
    Definition,
    External,
    Function,
    Module,
    Sources,
    Variable,
    assigned_to_self,
)

UNKNOWN = External("?")


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class."""

    kind: Class


@dataclass(frozen=True, slots=True)
class Bound:
    """A function as a value; `is_bound`: whether its first argument is already given, as in a method of an object."""

    function: Function
    is_bound: bool


@dataclass(frozen=True, slots=True)
class Container:
    """A container or callable. Its `kind` names the meaning of `items`: "list" (any iterable): the type of the
    elements; "dict": the types of keys and values; "tuple": one type for each position; "callable": the return type."""

    kind: str
    items: tuple[Type, ...]


@dataclass(frozen=True, slots=True)
class MethodOf:
    """A method of a container, as a value."""

    container: Container
    name: str


@dataclass(frozen=True, slots=True)
class Attributes:
    """The dictionary that `vars(object)` returns for an object."""

    of: Type


@dataclass(frozen=True, slots=True)
class Bases:
    """The type of `super()` in a method of the class `kind`; its attributes are those of the base classes of `kind`."""

    kind: Class


@dataclass(frozen=True, slots=True)
class Maker:
    """A function that constructs one of vLLM's records: the result of a call of our function `maker`."""

    kind: Class
    fields: tuple[str, ...]
    """Names of the fields that are passed by position."""
    optional: frozenset[str]
    """Names of fields that are omitted in versions of vLLM that lack them."""
    left: frozenset[str]
    """Names of fields that keep their defaults on purpose."""
    given: frozenset[str] = frozenset()
    """Names of fields that `functools.partial` has already given."""


Option = Instance | Class | Module | Bound | Container | MethodOf | Attributes | Bases | Maker | External
Type = tuple[Option, ...]

_LISTS = frozenset(
    {"list", "List", "Sequence", "MutableSequence", "Iterable", "Iterator", "Collection", "Generator"}
) | {"set", "Set", "AbstractSet", "frozenset", "deque", "Deque", "KeysView", "ValuesView"}
_DICTS = frozenset(["dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"])
_TRANSPARENT = frozenset(["Optional", "Union", "ClassVar", "Final", "Required", "NotRequired"])
_LISTED = frozenset(["list", "tuple", "set", "frozenset", "deque", "iter", "sorted", "reversed"])
Local = Callable[["Scope"], Type]


@dataclass
class Scope:
    """Resolves names in a module, a function, a comprehension, or a branch after `isinstance`. The scope of a module
    has no parent.

    If a name is bound several times in a function, its type has the options of all bindings.
    """

    module: Module
    parent: Scope | None = None
    owner: Class | None = None
    """The class of the method, if this is a method's scope."""
    names: dict[str, list[Local]] = field(default_factory=dict)
    known: dict[str, Type] = field(default_factory=dict)

    def child_scope(self, known: Mapping[str, Type]) -> Scope:
        """A scope within this scope, in which the names in `known` have the types given there."""
        return Scope(self.module, self, self.owner, known=dict(known))


def join_types(types: Iterable[Type]) -> Type:
    """The options of several types, as one type."""
    return tuple(dict.fromkeys(option for each in types for option in each))


def instance_classes(kind: Type) -> Iterator[Class]:
    for option in kind:
        if isinstance(option, Instance):
            yield option.kind


class Types:
    """Infers the types of expressions in Python code.

    Args:
        sources: sources of the code and of all modules that it imports.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.carried: dict[tuple[Class, str], Type] = {}
        """By class and attribute name: the type of an attribute without a usable annotation, inferred from a
        constructor argument of the same name."""
        self.mixed_into: dict[Class, Class] = {}
        """Classes that the code combines with another class at run time; the value is the other class, which follows in
        the bases."""
        self._attributes: dict[tuple[Class, str], Type] = {}
        self._functions: dict[ast.AST, Scope] = {}

    def forget_types(self) -> None:
        """Drop all inferred types, so that they are inferred again with the types that `carried` has got since."""
        self._attributes.clear()
        self._functions.clear()

    # ------------------------------------------------------------------ annotations

    def annotated_type(self, module: Module, node: ast.expr | None, owner: Class | None = None, depth: int = 0) -> Type:
        """The type that an annotation names."""
        if node is None or depth > 20:
            return (UNKNOWN,)
        if isinstance(node, ast.Constant):
            if node.value is None:
                return ()
            if not isinstance(node.value, str):
                return (UNKNOWN,)
            return self.annotated_type(module, ast.parse(node.value.strip(), mode="eval").body, owner, depth + 1)
        if isinstance(node, ast.BinOp):
            return join_types(self.annotated_type(module, each, owner, depth + 1) for each in (node.left, node.right))
        if isinstance(node, ast.Subscript):
            return self._parametrised_type(module, node, owner, depth)
        if isinstance(node, ast.Name) and node.id == "Self":
            return (UNKNOWN,) if owner is None else (Instance(owner),)
        if owner is not None and isinstance(node, ast.Name):
            inner = owner.member(node.id)
            if inner is not None and isinstance(inner.node, ast.ClassDef):
                return (Instance(self.sources.class_of(inner.owner.module, inner.node)),)
        what = self.sources.resolve(module, node)
        if isinstance(what, Class):
            return (Instance(what),)
        if isinstance(what, Variable) and what.node.value is not None and not isinstance(what.node.value, ast.Call):
            return self.annotated_type(what.module, what.node.value, None, depth + 1)
        return (UNKNOWN,)

    def _parametrised_type(self, module: Module, node: ast.Subscript, owner: Class | None, depth: int) -> Type:
        base = node.value
        name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]

        def of(part: ast.expr) -> Type:
            return self.annotated_type(module, part, owner, depth + 1)

        if name in _TRANSPARENT:
            return join_types(of(part) for part in parts)
        if name == "Annotated":
            return of(parts[0])
        if name in _LISTS:
            return (Container("list", (of(parts[0]),)),)
        if name in _DICTS and len(parts) == 2:
            return (Container("dict", (of(parts[0]), of(parts[1]))),)
        if name in ("tuple", "Tuple"):
            if len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is Ellipsis:
                return (Container("list", (of(parts[0]),)),)
            return (Container("tuple", tuple(of(part) for part in parts)),)
        if name in ("type", "Type"):
            return tuple(each.kind if isinstance(each, Instance) else UNKNOWN for each in of(parts[0]))
        if name == "Callable":
            return (Container("callable", (of(parts[-1]),)),)
        what = self.sources.resolve(module, base)
        return (Instance(what),) if isinstance(what, Class) else (UNKNOWN,)

    # ------------------------------------------------------------------ names

    def function_scope(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, module: Module, owner: Class | None, parent: Scope | None
    ) -> Scope:
        """The scope of a function's body."""
        if node not in self._functions:
            scope = Scope(module, parent, owner)
            self._bind_arguments(scope, node)
            for each in _own_statements(node.body):
                self._bind_statement(scope, each)
            self._functions[node] = scope
        return self._functions[node]

    def _bind_arguments(self, scope: Scope, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args]
        if scope.owner is not None and arguments:
            method = Function(scope.module, node, scope.owner)
            is_of_class = "classmethod" in method.decorators or node.name == "__new__"
            if "staticmethod" not in method.decorators:
                first = arguments.pop(0)
                scope.known[first.arg] = (scope.owner if is_of_class else Instance(scope.owner),)
        for each in [*arguments, *node.args.kwonlyargs]:
            scope.known[each.arg] = self.annotated_type(scope.module, each.annotation, scope.owner)
        for star in (node.args.vararg, node.args.kwarg):
            if star is not None:
                scope.known[star.arg] = (UNKNOWN,)

    def _bind_statement(self, scope: Scope, node: ast.AST) -> None:
        def bind(target: ast.expr, value: Local) -> None:
            for name, part in self._assigned_names(target, value):
                scope.names.setdefault(name, []).append(part)

        if isinstance(node, ast.AnnAssign):
            kind = node.annotation
            bind(node.target, lambda at: self.annotated_type(at.module, kind, at.owner))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                bind(target, lambda at, value=node.value: self.infer(value, at))  # type: ignore[misc]
        elif isinstance(node, ast.NamedExpr):
            bind(node.target, lambda at: self.infer(node.value, at))
        elif isinstance(node, ast.For | ast.AsyncFor):
            bind(node.target, lambda at: self.element_type(self.infer(node.iter, at)))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            bind(node.optional_vars, lambda at: (UNKNOWN,))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bound = scope.names.setdefault(alias.asname or alias.name, [])
                bound.append(lambda at, alias=alias: self._import(node, alias, at))  # type: ignore[misc]
        elif isinstance(node, ast.ClassDef):
            scope.names[node.name] = [lambda at: (self.local_class(node, at),)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope.names[node.name] = [lambda at: (Bound(Function(at.module, node), False),)]

    def _assigned_names(self, target: ast.expr, value: Local) -> Iterator[tuple[str, Local]]:
        """Yield each name in the target of an assignment, with the part of the value that is assigned to it."""
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple | ast.List):
            for at, each in enumerate(target.elts):
                if isinstance(each, ast.Starred):
                    yield from self._assigned_names(each.value, lambda _: (UNKNOWN,))
                else:
                    yield from self._assigned_names(each, lambda scope, at=at: self._item_type(value(scope), at))  # type: ignore[misc]

    def _import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias, scope: Scope) -> Type:
        if isinstance(node, ast.Import):
            module = self.sources.module(alias.name if alias.asname else alias.name.partition(".")[0])
            return (module,) if isinstance(module, Module) else (UNKNOWN,)
        found = self.sources.module(scope.module.absolute_name(node))
        if found is None:
            return ()
        what = self.sources.find(found, alias.name) if isinstance(found, Module) else found
        return () if what is None else self._definition_type(what)

    def local_class(self, node: ast.ClassDef, scope: Scope) -> Class:
        """A class within a function; its bases may be arguments of the function."""
        bases = [option for base in node.bases for option in self.infer(base, scope)]
        known = [base if isinstance(base, Class) else External("?") for base in bases]
        return self.sources.class_of(scope.module, node, known)

    def _definition_type(self, what: Definition | Class | None) -> Type:
        """The type of a definition in a module."""
        if isinstance(what, Function):
            return (Bound(what, False),)
        if isinstance(what, Class | Module):
            return (what,)
        if isinstance(what, Variable):
            if isinstance(what.node, ast.AnnAssign):
                return self.annotated_type(what.module, what.node.annotation)
            return self.infer(what.node.value, Scope(what.module)) if len(what.node.targets) == 1 else (UNKNOWN,)
        return (UNKNOWN,)

    def type_of_name(self, name: str, scope: Scope) -> Type:
        """The type of a name in a scope."""
        at: Scope | None = scope
        while at is not None:
            if name in at.known:
                return at.known[name]
            if name in at.names:
                at.known[name] = ()  # ends a recursion during the lookup
                at.known[name] = join_types(each(at) for each in at.names[name])
                return at.known[name]
            at = at.parent
        return self._definition_type(self.sources.find(scope.module, name))

    # ------------------------------------------------------------------ attributes

    def attribute_type(self, kind: Type, name: str) -> Type:
        """The type of the attribute `name` of a value of type `kind`."""
        return join_types(self._attribute_type_of_option(option, name) for option in kind)

    def _attribute_type_of_option(self, option: Option, name: str) -> Type:
        if isinstance(option, Instance):
            return self._instance_attribute_type(option.kind, name)
        if isinstance(option, Class):
            return self._class_attribute_type(option, name)
        if isinstance(option, Bases):
            for base in option.kind.lineage[1:]:
                if name in base.own_members:
                    return self._instance_attribute_type(base, name)
        if isinstance(option, Module):
            return self._definition_type(self.sources.find(option, name))
        if isinstance(option, Container):
            return (MethodOf(option, name),)
        return (UNKNOWN,)

    def _instance_attribute_type(self, kind: Class, name: str) -> Type:
        key = kind, name
        if key not in self._attributes:
            self._attributes[key] = ()  # ends a recursion during the lookup
            found = self._inferred_attribute_type(kind, name)
            if UNKNOWN in found:
                found = next((self.carried[each, name] for each in kind.lineage if (each, name) in self.carried), found)
            self._attributes[key] = found
        return self._attributes[key]

    def _inferred_attribute_type(self, kind: Class, name: str) -> Type:
        member = kind.member(name)
        if member is None:
            base = next((self.mixed_into[each] for each in kind.lineage if each in self.mixed_into), None)
            return (UNKNOWN,) if base is None else self._instance_attribute_type(base, name)
        function = member.function
        if function is not None:
            if member.is_property:
                return self.annotated_type(function.module, function.node.returns, kind)
            return (Bound(function, "staticmethod" not in function.decorators),)
        if isinstance(member.node, ast.AnnAssign):
            return self.annotated_type(member.owner.module, member.node.annotation, kind)
        if not isinstance(member.node, ast.Assign):
            return (UNKNOWN,)
        if member.method is None:
            return self.infer(member.node.value, Scope(member.owner.module))
        scope = self.function_scope(member.method.node, member.method.module, kind, None)
        assignments = [node for each, node in assigned_to_self(member.method.node) if each == name]
        return join_types(
            self._part_type(node, name, self.infer(node.value, scope))
            for node in assignments
            if isinstance(node, ast.Assign)
        )

    def _part_type(self, node: ast.Assign, name: str, value: Type) -> Type:
        """The type of the part of `value` that an assignment such as `self.a, self.b = value` assigns to the attribute
        `name`."""
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                for at, each in enumerate(target.elts):
                    if isinstance(each, ast.Attribute) and each.attr == name:
                        return self._item_type(value, at)
        return value

    def _class_attribute_type(self, kind: Class, name: str) -> Type:
        member = kind.member(name)
        if member is None:
            return (UNKNOWN,)
        if isinstance(member.node, ast.ClassDef):
            return (self.sources.class_of(member.owner.module, member.node),)
        if member.function is not None:
            return (Bound(member.function, "classmethod" in member.function.decorators),)
        return self._instance_attribute_type(kind, name)

    # ------------------------------------------------------------------ containers

    def element_type(self, kind: Type) -> Type:
        """The type of the elements when a value of type `kind` is iterated over."""
        found: list[Type] = []
        for option in kind:
            if isinstance(option, Container) and option.kind in ("list", "dict"):
                found.append(option.items[0])
            elif isinstance(option, Container) and option.kind == "tuple":
                found.append(join_types(option.items))
            elif isinstance(option, Instance) and option.kind.member("__iter__") is not None:
                found.append(
                    self.element_type(self._return_type(self._instance_attribute_type(option.kind, "__iter__")))
                )
            else:
                found.append((UNKNOWN,))
        return join_types(found)

    def _item_type(self, kind: Type, at: int | None) -> Type:
        """The type of the item at index `at` of a value of type `kind`; `at` None: the index is unknown."""
        found: list[Type] = []
        for option in kind:
            if isinstance(option, Container) and option.kind == "tuple" and at is not None and at < len(option.items):
                found.append(option.items[at])
            elif isinstance(option, Container) and option.kind == "dict":
                found.append(option.items[1])
            elif isinstance(option, Instance) and option.kind.member("__getitem__") is not None:
                found.append(self._return_type(self._instance_attribute_type(option.kind, "__getitem__")))
            else:
                found.append(self.element_type((option,)))
        return join_types(found)

    def _subscript_type(self, node: ast.Subscript, scope: Scope) -> Type:
        value = self.infer(node.value, scope)
        if isinstance(node.slice, ast.Slice):
            return value
        at = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(at, str):
            objects = join_types(option.of for option in value if isinstance(option, Attributes))
            if objects:
                return self.attribute_type(objects, at)
        return self._item_type(value, at if isinstance(at, int) else None)

    # ------------------------------------------------------------------ calls

    def _return_type(self, kind: Type) -> Type:
        """The type of the result of calling a value of type `kind`."""
        found: list[Type] = []
        for option in kind:
            if isinstance(option, Class):
                found.append((Instance(option),))
            elif isinstance(option, Maker):
                found.append((Instance(option.kind),))
            elif isinstance(option, Bound) and "contextmanager" not in option.function.decorators:
                function = option.function
                found.append(self.annotated_type(function.module, function.node.returns, function.owner))
            elif isinstance(option, Container) and option.kind == "callable":
                found.append(option.items[0])
            elif isinstance(option, MethodOf):
                found.append(self._method_return_type(option))
            else:
                found.append((UNKNOWN,))
        return join_types(found)

    def _method_return_type(self, method: MethodOf) -> Type:
        container, name = method.container, method.name
        if name == "copy":
            return (container,)
        if container.kind == "dict":
            key, value = container.items
            if name in ("get", "pop", "setdefault"):
                return value
            if name in ("values", "keys"):
                return (Container("list", (value if name == "values" else key,)),)
            if name in ("items", "popitem"):
                pair: Type = (Container("tuple", (key, value)),)
                return (Container("list", (pair,)),) if name == "items" else pair
        if container.kind == "list" and name in ("pop", "popleft"):
            return container.items[0]
        return (UNKNOWN,)

    def _call_type(self, node: ast.Call, scope: Scope) -> Type:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        of = [self.infer(each, scope) for each in node.args if not isinstance(each, ast.Starred)]
        if name == "super" and scope.owner is not None:
            return (Bases(scope.owner),)
        if name in ("max", "min", "next") and of:
            return join_types([self.element_type(of[0]), *of[1:]]) if len(of) == 1 or name == "next" else join_types(of)
        if name == "getattr" and len(of) >= 2 and isinstance(node.args[1], ast.Constant):
            return join_types([self.attribute_type(of[0], str(node.args[1].value)), *of[2:]])
        if name == "maker" and of:
            return tuple(_type_of_maker_call(node, each) if isinstance(each, Class) else UNKNOWN for each in of[0])
        if name == "partial" and of:
            names = frozenset(each.arg for each in node.keywords if each.arg is not None)
            return tuple(replace(each, given=names) if isinstance(each, Maker) else UNKNOWN for each in of[0])
        if name == "map" and of:
            return (Container("list", (self._return_type(of[0]),)),)
        if name == "type" and len(of) == 1:
            return tuple(each.kind if isinstance(each, Instance) else UNKNOWN for each in of[0])
        if name == "vars" and of:
            return (Attributes(of[0]),)
        if name in ("replace", "copy") and of:
            return of[0]
        if name in _LISTED and of:
            return (Container("list", (self.element_type(of[0]),)),)
        if name == "enumerate" and of:
            return (Container("list", ((Container("tuple", ((UNKNOWN,), self.element_type(of[0]))),),)),)
        if name == "zip":
            return (Container("list", ((Container("tuple", tuple(self.element_type(each) for each in of)),),)),)
        if name == "chain":
            return (Container("list", (join_types(self.element_type(each) for each in of),)),)
        if name == "dict" and of:
            pairs = self.element_type(of[0])
            return (Container("dict", (self._item_type(pairs, 0), self._item_type(pairs, 1))),)
        return self._return_type(self.infer(node.func, scope))

    # ------------------------------------------------------------------ expressions

    def infer(self, node: ast.expr, scope: Scope) -> Type:
        """The type of an expression."""
        if isinstance(node, ast.Constant):
            return () if node.value is None else (UNKNOWN,)
        if isinstance(node, ast.Name):
            return self.type_of_name(node.id, scope)
        if isinstance(node, ast.Attribute):
            return self.attribute_type(self.infer(node.value, scope), node.attr)
        if isinstance(node, ast.Call):
            return self._call_type(node, scope)
        if isinstance(node, ast.Subscript):
            return self._subscript_type(node, scope)
        if isinstance(node, ast.IfExp):
            return join_types(
                [self.infer(node.body, self.narrowed_scope(node.test, scope)), self.infer(node.orelse, scope)]
            )
        if isinstance(node, ast.BoolOp):
            return join_types(self.infer(each, scope) for each in node.values)
        if isinstance(node, ast.NamedExpr | ast.Await):
            return self.infer(node.value, scope)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return (Container("list", (self.infer(node.elt, self.comprehension_scope(node.generators, scope)),)),)
        if isinstance(node, ast.DictComp):
            inner = self.comprehension_scope(node.generators, scope)
            return (Container("dict", (self.infer(node.key, inner), self.infer(node.value, inner))),)
        if isinstance(node, ast.Tuple) and not any(isinstance(each, ast.Starred) for each in node.elts):
            return (Container("tuple", tuple(self.infer(each, scope) for each in node.elts)),)
        if isinstance(node, ast.List | ast.Set | ast.Tuple):
            return (Container("list", (join_types(self._list_item_type(each, scope) for each in node.elts),)),)
        if isinstance(node, ast.Dict):
            keys = join_types(self.infer(each, scope) for each in node.keys if each is not None)
            return (Container("dict", (keys, join_types(self.infer(each, scope) for each in node.values))),)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.BitOr):
            return join_types([self.infer(node.left, scope), self.infer(node.right, scope)])
        return (UNKNOWN,)

    def _list_item_type(self, node: ast.expr, scope: Scope) -> Type:
        if isinstance(node, ast.Starred):
            return self.element_type(self.infer(node.value, scope))
        return self.infer(node, scope)

    def comprehension_scope(self, generators: list[ast.comprehension], scope: Scope) -> Scope:
        """The scope inside a comprehension, in which the comprehension's variables have types."""
        for each in generators:
            kind = self.element_type(self.infer(each.iter, scope))
            names = {name: part(scope) for name, part in self._assigned_names(each.target, lambda _, kind=kind: kind)}  # type: ignore[misc]
            scope = scope.child_scope(names)
            for test in each.ifs:
                scope = self.narrowed_scope(test, scope)
        return scope

    def narrowed_scope(self, test: ast.expr, scope: Scope) -> Scope:
        """The scope of the code that runs if a test is true; a test `isinstance(name, classes)` gives `name` the type
        `classes`."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for each in test.values:
                scope = self.narrowed_scope(each, scope)
            return scope
        if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"):
            return scope
        name, kinds = test.args
        if not isinstance(name, ast.Name):
            return scope
        given = self.infer(kinds, scope)
        flat = join_types(join_types(each.items) if isinstance(each, Container) else (each,) for each in given)
        return scope.child_scope(
            {name.id: tuple(Instance(each) if isinstance(each, Class) else UNKNOWN for each in flat)}
        )


def _type_of_maker_call(node: ast.Call, kind: Class) -> Maker:
    """The type of the function that our function `maker` returns in the call `node`. `kind`: class of the records."""
    lists = {each.arg: getattr(each.value, "elts", []) for each in node.keywords}
    optional, left = (frozenset(_strings(lists.get(name, []))) for name in ("optional", "left"))
    return Maker(kind, tuple(_strings(node.args[1:])), optional, left)


def _strings(nodes: list[ast.expr]) -> Iterator[str]:
    return (str(each.value) for each in nodes if isinstance(each, ast.Constant))


def _own_statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes of a body, without the nodes of functions and classes within it."""
    for node in body:
        yield from _own_nodes(node)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for each in ast.iter_child_nodes(node):
            yield from _own_nodes(each)
