"""Runs one pure function on arrays that live on different devices.

A compiled program has one set of devices. The leaves of a pipeline's state have several: each
lives with the stage that uses it. Here a function of all of them (an optimizer's update, say) is
traced once, and its operations are divided: each runs where its operands are. What is computed from
small replicated values alone runs wherever it is needed. Only small values, such as the sums behind
a global norm, move between sites; an operation that would need large arrays of two sites is
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.compat import is_key, key_bits
from fzero.errors import StateError
from fzero.processes import copied, from_host, jit_on
from fzero.programs.jaxprs import Op, Program, Var, run_ops
from fzero.tree import PyTree, shape_at


# Values of up to so many elements may move between sites.
SMALL = 4096

Devices = tuple[Any, ...]


class Site(NamedTuple):
    """Where an operation runs.

    Attributes:
        devices: the devices, in mesh order.
        label: what is computed together there. Programs of the same labels are the same, wherever
            they are placed, and so are their results, to the bit.
    """

    devices: Devices
    label: str


def devices_of(sharding: NamedSharding) -> Devices:
    """The devices of a sharding, in mesh order."""
    return tuple(sharding.mesh.devices.flat)


@dataclass
class Section:
    """What one site computes at once.

    Args:
        mesh: the site.
        ops: the operations, in order.
        reads: values from outside.
        gives: values needed elsewhere, later or by the caller.
    """

    mesh: Mesh
    ops: list[Op] = field(default_factory=list)
    reads: list[Var] = field(default_factory=list)
    gives: list[Var] = field(default_factory=list)
    program: Any = None


@dataclass(frozen=True)
class _Where:
    site: Site | None  # None: from small replicated values alone, so anywhere
    hops: int  # how often what it is made of went from one site to another


class Labels(NamedTuple):
    """What is computed together, of one site: leaves with equal labels.

    Args:
        given: a label for each leaf of the arguments.
        made: takes the results' shapes and gives a label for each leaf, which counts where it
            follows from no large argument. By default they have none.
    """

    given: PyTree = None
    made: Callable[[PyTree], Sequence[str]] | None = None


NO_LABELS = Labels()


def bring(value: Any, mesh: Any) -> jax.Array:
    """A value on the devices of a mesh."""
    to = NamedSharding(mesh, PartitionSpec())
    if not isinstance(value, jax.Array) or not isinstance(value.sharding, NamedSharding):
        return from_host(value, to)  # a constant of the function
    return value if value.sharding.device_set == to.device_set else copied(value, mesh)


class PlacedFunction:
    """A pure function whose arguments and results live on different devices.

    Args:
        function: what to run.
        args: its arguments as `jax.ShapeDtypeStruct`s with `NamedSharding`s.
        out_shardings: takes the outputs' shapes and gives a `NamedSharding` for each.
        everywhere: mesh of all devices.
        donate: indices of arguments whose memory may be reused.
        labels: what is computed together; all of a site, if not given.
        what: what the function is, for messages.
        compiler_options: of every program.

    Raises:
        StateError: an operation needs large arrays of two sites.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        args: Sequence[PyTree],
        out_shardings: Callable[[PyTree], PyTree],
        everywhere: Mesh,
        donate: Sequence[int] = (),
        labels: Labels = NO_LABELS,
        what: str = "function",
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.compiler_options = dict(compiler_options or {}) or None
        self.everywhere = everywhere
        self.what = what
        leaves, self.in_tree = jax.tree.flatten(tuple(args))
        plain = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        closed, out = jax.make_jaxpr(
            lambda *flat: function(*jax.tree.unflatten(self.in_tree, flat)), return_shape=True
        )(*plain)
        self.out, self.out_tree = out, jax.tree.structure(out)
        wanted = jax.tree.leaves(out_shardings(out))
        self.program = Program(closed.jaxpr, closed.consts)
        self._separate_results(leaves, wanted)
        self.meshes: dict[Devices, Any] = {tuple(everywhere.devices.flat): everywhere}
        self.shardings: dict[Var, NamedSharding] = {}
        self.where: dict[Var, _Where] = {}
        self._locate_inputs(leaves, jax.tree.leaves(labels.given) or [""] * len(leaves))
        self._locate_ops()
        donated = [i in donate for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        self.donated = {v for v, d in zip(self.program.inputs, donated, strict=True) if d}
        self._divide(wanted, labels.made(out) if labels.made else [""] * len(wanted))

    def _separate_results(self, leaves: Sequence[Any], wanted: Sequence[NamedSharding]) -> None:
        """Makes a result a value of its own where it is another result, a constant (which lies
        nowhere yet), or an argument that lies otherwise: initial parameters in an optimizer's
        state, say."""
        lies = {v: leaf.sharding for v, leaf in zip(self.program.inputs, leaves, strict=True)}
        seen: set[Var] = set()
        for index, (var, to) in enumerate(zip(self.program.outputs, wanted, strict=True)):
            if not isinstance(var, Var):
                continue
            constant = var in self.program.consts
            if not constant and devices_of(lies.setdefault(var, to)) != devices_of(to):
                continue
            if constant or var in seen or not lies[var].is_equivalent_to(to, var.aval.ndim):
                own = Var(var.aval)
                self.program.ops.append(Op(None, [var], [own]))
                self.program.outputs[index] = own
            seen.add(var)

    def _locate_inputs(self, leaves: Sequence[Any], labels: Sequence[str]) -> None:
        whole = tuple(self.everywhere.devices.flat)
        for var, leaf, label in zip(self.program.inputs, leaves, labels, strict=True):
            sharding = leaf.sharding
            devices = devices_of(sharding)
            self.meshes.setdefault(devices, sharding.mesh)
            self.shardings[var] = sharding
            anywhere = devices == whole and sharding.is_fully_replicated and _small(var)
            anywhere = anywhere and not label
            self.where[var] = _Where(None if anywhere else Site(devices, label), 0)
        for var in self.program.consts:
            self.where[var] = _Where(None, 0)

    def _locate_ops(self) -> None:
        for op in self.program.ops:
            at = [self.where[x] for x in op.reads()]
            site = self._site_of(op)
            hops = max((w.hops + (w.site not in (site, None)) for w in at), default=0)
            for var in op.results:
                self.where[var] = _Where(site, hops)
        self._sink()

    def _sink(self) -> None:
        """Lets operations wait until their results are read, where nobody else waits for them.

        A moment's decay, say, could be computed before the gradients' norm is known, but would then
        have to be kept: as much memory as the moment, and not the rounding of one program.
        """
        readers: dict[Var, list[_Where]] = {}
        for op in reversed(self.program.ops):
            if not op.results:
                continue
            where = self.where[op.results[0]]
            later = [at for var in op.results for at in readers.get(var, [])]
            if later and where.site is not None and {at.site for at in later} == {where.site}:
                where = _Where(where.site, min(at.hops for at in later))
                self.where.update(dict.fromkeys(op.results, where))
            for var in op.reads():
                readers.setdefault(var, []).append(where)

    def _site_of(self, op: Op) -> Site | None:
        """Where the largest operand is; nowhere in particular if small ones come from several.

        What needs large arrays with several labels has none: it is computed from all at once.
        """
        sites = {x: self.where[x].site for x in op.reads() if self.where[x].site is not None}
        bound = self._bound(op)
        if bound is not None:
            sites = {x: p for x, p in sites.items() if p is not None and p.devices == bound}
        large = {site for x, site in sites.items() if site is not None and not _small(x)}
        if len({site.devices for site in large}) > 1:
            raise StateError(self._explain(op))
        if len(large) > 1:
            return Site(large.pop().devices, "")
        most = max((_size(x) for x in sites), default=0)
        largest = {site for x, site in sites.items() if _size(x) == most}
        if len(largest) == 1:
            return largest.pop()
        return None if bound is None else Site(bound, "")

    def _bound(self, op: Op) -> Devices | None:
        """The devices of an operation that names them."""
        params = {} if op.equation is None else op.equation.params
        mesh = params.get("mesh", getattr(params.get("sharding"), "mesh", None))
        if not isinstance(mesh, Mesh):  # an abstract mesh names axes, but no devices
            return None
        devices = tuple(mesh.devices.flat)
        self.meshes.setdefault(devices, mesh)
        return devices

    def _explain(self, op: Op) -> str:
        shapes = [x.aval.str_short() for x in op.reads() if not _small(x)]
        source = getattr(op.equation, "source_info", None)
        frame = f" ({source.name_stack})" if source is not None and str(source.name_stack) else ""
        return (
            f"{self.what}: its operation {op.equation.primitive.name}{frame} needs large arrays"
            f" of several pipeline stages at once: {', '.join(shapes)}. Leaf-wise operations can be"
            f" divided, and up to {SMALL} elements (norms, counts) can cross stages, but not whole"
            " leaves: use an optimizer that does not join them (no optax.flatten; no condition over"
            " all of them, as optax.MultiSteps has: fz.accumulate_step accumulates), or plan with"
            " pipe=1"
        )

    def _divide(self, wanted: Sequence[NamedSharding], labels: Sequence[str]) -> None:
        """Makes one program per site and number of hops."""
        sections: dict[tuple[Site, int], Section] = {}
        maker = {var: op for op in self.program.ops for var in op.results}
        order = {id(op): i for i, op in enumerate(self.program.ops)}

        def section(site: Site, hops: int) -> Section:
            return sections.setdefault((site, hops), Section(self.meshes[site.devices]))

        def give(var: Var, by: Section, key: tuple[Site, int]) -> None:
            """Adds a value, and everything it takes, to a section."""
            if var not in by.gives:
                by.gives.append(var)
            pending, seen = [var], {x for op in by.ops for x in op.results} | set(by.reads)
            while pending:
                x = pending.pop()
                if x in seen or x in self.program.consts:
                    continue
                seen.add(x)
                at, op = self.where[x], maker.get(x)
                here = op is not None and (at.site is None or (at.site, at.hops) == key)
                if here:
                    assert op is not None
                    seen.update(op.results)
                    by.ops.append(op)
                    pending.extend(op.reads())
                    continue
                by.reads.append(x)
                if op is not None:
                    assert at.site is not None
                    give(x, section(at.site, at.hops), (at.site, at.hops))

        self.outputs = list(zip(self.program.outputs, wanted, strict=True))
        for (var, sharding), label in zip(self.outputs, labels, strict=True):
            if not isinstance(var, Var) or var not in maker:
                continue
            site, hops = self.where[var].site, self.where[var].hops
            if site is None:
                site = Site(devices_of(sharding), label)
                self.meshes.setdefault(site.devices, sharding.mesh)
            if site.devices == devices_of(sharding):
                self.shardings.setdefault(var, sharding)
            give(var, section(site, hops), (site, hops))
        self.sections = [sections[key] for key in sorted(sections, key=lambda k: k[1])]
        for one in self.sections:
            one.ops.sort(key=lambda op: order[id(op)])
        self._compile()

    def _compile(self) -> None:
        last: dict[Var, int] = {}
        for index, section in enumerate(self.sections):
            last.update(dict.fromkeys(section.reads, index))
        kept = {var for var, _ in self.outputs if isinstance(var, Var)}
        for index, section in enumerate(self.sections):
            whole = tuple(section.mesh.devices.flat)
            replicated = NamedSharding(section.mesh, PartitionSpec())
            out = [
                self.shardings[var] if var in self.shardings
                and devices_of(self.shardings[var]) == whole
                else (replicated if _small(var) else None)
                for var in section.gives
            ]  # fmt: skip
            # Memory can be reused for results of the same shape only.
            room = Counter(
                _local(var, sharding)
                for var, sharding in zip(section.gives, out, strict=True)
                if sharding is not None
            )
            donate = []
            for i, var in enumerate(section.reads):
                if var not in self.donated or last[var] != index or var in kept:
                    continue
                # A number is not worth it, and whoever fails before anything else is given away has
                # taken nothing.
                if not var.aval.shape or devices_of(self.shardings[var]) != whole:
                    continue
                shape = _local(var, self.shardings[var])
                if room[shape]:
                    room[shape] -= 1
                    donate.append(i)
            section.program = jit_on(
                section.mesh, self._runner(section), out, donate_argnums=donate,
                compiler_options=self.compiler_options,
            )  # fmt: skip

    def _runner(self, section: Section) -> Callable[..., list[Any]]:
        def run(*values: Any) -> list[Any]:
            env: dict[Any, Any] = dict(self.program.consts)
            env.update(zip(section.reads, values, strict=True))
            run_ops(section.ops, env)
            return [env[var] for var in section.gives]

        return run

    def __call__(self, *args: PyTree) -> PyTree:
        """Runs the function."""
        env = self.bound(args)
        for section in self.sections:
            values = [bring(env[var], section.mesh) for var in section.reads]
            env.update(zip(section.gives, section.program(*values), strict=True))
        return self.results(env)

    def bound(self, args: Sequence[PyTree]) -> dict[Var, Any]:
        """A value for each input and constant."""
        leaves, tree = jax.tree.flatten(tuple(args))
        if str(tree) != str(self.in_tree):
            raise StateError(f"{self.what}: expected {self.in_tree}, got {tree}")
        return {**self.program.consts, **dict(zip(self.program.inputs, leaves, strict=True))}

    def results(self, env: Mapping[Var, Any], bring: Callable[[Any, Any], Any] = bring) -> PyTree:
        """What the function gives, from all that was computed.

        Args:
            env: a value for each output.
            bring: brings a value to where it is wanted.
        """
        out: list[Any] = []
        given: set[Var] = set()
        for var, sharding in self.outputs:
            if not isinstance(var, Var):
                out.append(bring(var, sharding.mesh))
                continue
            value = bring(env[var], sharding.mesh)
            # Each result is an array of its own: it may be given away.
            out.append(jnp.array(value, copy=True) if var in given else value)
            given.add(var)
        return jax.tree.unflatten(self.out_tree, out)

    def lowered(self) -> list[tuple[Mesh, Any]]:
        """Its programs, each with its site, lowered for the shapes that it was made for."""

        def shape(var: Var, mesh: Mesh) -> jax.ShapeDtypeStruct:
            to = self.shardings.get(var)
            if to is None or devices_of(to) != tuple(mesh.devices.flat):
                to = NamedSharding(mesh, PartitionSpec())
            return shape_at(var.aval, to)

        return [
            (
                section.mesh,
                section.program.lower(*(shape(var, section.mesh) for var in section.reads)),
            )
            for section in self.sections
        ]


def placed_with_key(
    function: Callable[..., PyTree],
    args: Sequence[Any],
    out_shardings: Callable[[PyTree], PyTree],
    everywhere: Mesh,
) -> Callable[..., PyTree]:
    """`PlacedFunction` for a function that takes random keys and gives one back.

    Keys travel as their bits: shards of a key array cannot be put together again.
    """

    # Keys are all of one kind here: those of the state.
    impl = next((jax.random.key_impl(x) for x in jax.tree.leaves(args) if is_key(x)), None)

    def keys(plain: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x, to: jax.random.wrap_key_data(x, impl=impl) if is_key(to) else x, plain, like
        )

    def with_bits(*plain: Any) -> PyTree:
        return jax.tree.map(key_bits, function(*keys(plain, like)))

    made: list[PlacedFunction] = []
    like, out = jax.eval_shape(lambda *args: (args, function(*args)), *args)

    def run(*args: Any) -> PyTree:
        whole = NamedSharding(everywhere, PartitionSpec())
        plain = jax.tree.map(lambda x: from_host(key_bits(x), whole) if is_key(x) else x, args)
        shapes = jax.tree.map(lambda x: shape_at(x, x.sharding), plain)
        if not made:
            made.append(PlacedFunction(with_bits, shapes, out_shardings, everywhere, what="init"))
        return keys(none_given(made[0](*plain), plain), out)

    return run


def none_given(results: PyTree, args: PyTree) -> PyTree:
    """Results, each an array of its own: the caller keeps the arguments that are among them."""
    given = {id(leaf) for leaf in jax.tree.leaves(args)}
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if id(x) in given else x, results)


def _local(var: Var, sharding: NamedSharding) -> tuple[tuple[int, ...], Any]:
    """What a device holds of a value."""
    return sharding.shard_shape(var.aval.shape), var.aval.dtype


def _size(var: Var) -> int:
    return int(np.prod(var.aval.shape, dtype=np.int64))


def _small(var: Var) -> bool:
    return _size(var) <= SMALL
