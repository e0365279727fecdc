"""A converted module: its graph as JAX functions, its leaves, and models of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fzero.errors import ConversionError
from fzero.links import Context, Shard
from fzero.model import Model
from fzero.summary import Printed, summary
from fzero.tree import shapes_of
from torch_bridge.dtypes import is_float
from torch_bridge.export.mode import Mode, bind_state, frozen_dtypes, in_own_dtypes
from torch_bridge.export.reach import reached_params
from torch_bridge.export.stand_ins.capacity import counts
from torch_bridge.loss_module import require_of_jax, tensors_told
from torch_bridge.losses import all_but_the_loss, called_with_batch, module_loss, of_output
from torch_bridge.module.adapters import Adapter
from torch_bridge.module.initial import on_host, with_masters
from torch_bridge.module.names import Layout
from torch_bridge.module.signature import build_output
from torch_bridge.structure.blocks import Blocks
from torch_bridge.structure.calls import calls, finished
from torch_bridge.structure.chain import Chain, links_merged
from torch_bridge.structure.divide import Parallel
from torch_bridge.structure.loops import LoopedGraph
from torch_bridge.structure.loss_call import FindCall, NotOneCallError, find_call, predicted
from torch_bridge.structure.programs import CallPrograms
from torch_bridge.structure.retrace import Call, Computed, Graphs
from torch_bridge.structure.stacked_names import Names
from torch_bridge.structure.unread_parameters import may_be_unread


Arrays = Mapping[str, Any]


class Applied(NamedTuple):
    """What a converted module gives back: its output and the buffers after the call."""

    output: Any
    buffers: dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Converted(Printed):
    """A PyTorch module as a pure function.

    Attributes:
        frozen: names in `params` with `requires_grad=False`; no gradient reaches them, and no step
            of `model(...)` changes them.
        layout: names, ties and torch dtypes of every tensor of the module.
        blocks: which blocks were found equal and rolled, and why others were not.
        names: which entries are stacked, and of what.
        parallel: what a plan with `tensor` divides, how and why, and what it does not.
        masters: whether `model` gives trained parameters of 16 bits float32 masters.
        adapters: what PEFT or `tb.lora` has put into the module, by name.
        base: what `tb.lora` was given.
    """

    frozen: frozenset[str]
    layout: Layout
    blocks: Blocks
    names: Names = field(repr=False)
    parallel: Parallel = field(repr=False)
    masters: bool
    _params: dict[str, Any] = field(repr=False)
    _buffers: dict[str, Any] = field(repr=False)
    _graphs: Graphs = field(repr=False)
    adapters: Mapping[str, Adapter] = field(default_factory=dict, repr=False)
    base: Converted | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        """Itself, as of a function: nothing in it changes."""
        return self

    def _summary(self) -> str:
        shapes = {"params": shapes_of(self._params), "buffers": shapes_of(self._buffers)}
        return summary("Converted", shapes).replace(" on each device", "", 1)

    @cached_property
    def params(self) -> dict[str, Any]:
        """Initial values of what is trained, keyed by `state_dict` name.

        Read-only host arrays of the module's dtypes; of a large module they are copied when they
        are first asked for, which `model` and `fz.init` do not do. Tied weights are one entry,
        under their first name. Parameters of equal blocks are one entry, stacked:
        `h.*.ln.weight`, shape `(L, ...)`. What has no value (a module on the `meta` device) is a
        `LazyArray` that says so when it is read.
        """
        return {name: on_host(value) for name, value in self._params.items()}

    @cached_property
    def buffers(self) -> dict[str, Any]:
        """Running statistics, integer and other untrained tensors, keyed as `params`."""
        return {name: on_host(value) for name, value in self._buffers.items()}

    @property
    def _modes(self) -> Mapping[bool, Mode]:
        """The example's graphs."""
        return self._graphs.modes

    @property
    def _rolled(self) -> Mapping[bool, LoopedGraph]:
        """The same with their equal blocks rolled; empty where none are."""
        return self._graphs.rolled

    @property
    def within_capacity(self) -> bool:
        """Whether experts have a capacity in train mode, so that its output is `Counted`."""
        return True in self._modes and counts(self._modes[True])

    def apply(
        self,
        params: Arrays,
        buffers: Arrays,
        *args: Any,
        rng: Any = None,
        train: bool = False,
        **kwargs: Any,
    ) -> Applied:
        """Run the module's forward.

        Sizes that the example's graph does not hold for (a batch of 1, most often) are traced when
        they first come; so is another dtype of the parameters, as `module.to(dtype)`.

        Args:
            params: values for `self.params`, same names and shapes, in their dtypes or all in
                another one; or those of a chain that `model` gave, which has them by link.
            buffers: values for `self.buffers`, likewise.
            *args: the module's own arguments: arrays (or tensors, which are copied) where the
                example had tensors, the example's value where it had anything else. Floats of
                another dtype are cast to the parameters' where the module does not take them.
            rng: a JAX key; needed when the mode draws random numbers (dropout in train mode).
            train: which of the two graphs runs.
            **kwargs: the module's own keyword arguments.

        Returns:
            `(output, buffers)`: the output in the module's structure, and all buffers with the
            ones that the forward updates replaced. With a capacity the output in train mode is a
            pair: the module's, and float32 `(2,)`, how many choices of experts were dropped, and
            how many there were.

        Raises:
            ConversionError: other arguments, names or shapes than the module was converted with,
                sizes that it does not take, or a missing `rng`.

        Example:
            >>> import jax, torch
            >>> from torch_bridge import convert
            >>> module = torch.nn.Linear(3, 2)
            >>> converted = convert(module, torch.zeros(4, 3))
            >>> rows = jax.numpy.ones((5, 3))
            >>> out, buffers = converted.apply(converted.params, {}, rows)
            >>> out.shape
            (5, 2)
        """
        computed = self._graphs.dtype_of(links_merged(params))
        return self._applied(computed, params, buffers, args, kwargs, rng, train)

    def _applied(
        self,
        computed: Computed | None,
        params: Arrays,
        buffers: Arrays,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng: Any,
        train: bool,
    ) -> Applied:
        params, buffers = links_merged(params), links_merged(buffers)
        call = self._graphs.call(bool(train), args, kwargs, computed)
        leaves, new = self._run(call, params, buffers, rng, train)
        return Applied(build_output(call.mode.out_spec, leaves), new)

    def _run(
        self, call: Call, params: Arrays, buffers: Arrays, rng: Any, train: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        """A call's output leaves, and all buffers after it."""
        mode = call.mode
        if mode.graph.num_draws and rng is None:
            raise ConversionError(
                f"the {'train' if train else 'eval'} forward draws random numbers in "
                f"{mode.graph.num_draws} place(s) (dropout and the like): pass "
                "rng=jax.random.key(...)"
            )
        if call.rolled is not None:
            leaves, updated = self._run_rolled(mode, call.rolled, call.inputs, params, buffers, rng)
        else:
            values = self._bind_leaves(mode, params, buffers) | call.inputs
            leaves, changed = mode.graph.run(values, rng)
            names = self.layout.leaf_of()
            updated = {names[name].name: value for name, value in changed.items()}
        return leaves, {**buffers, **in_own_dtypes(updated, buffers)}

    def _run_rolled(
        self,
        mode: Mode,
        rolled: LoopedGraph,
        inputs: dict[str, Any],
        params: Arrays,
        buffers: Arrays,
        rng: Any,
    ) -> tuple[list[Any], dict[str, Any]]:
        """The output leaves and the buffers that were written."""
        inside = self.names.row_of()
        stacked = {one.name: one.name for one in self.names.stacked if one.is_param}
        kept = {one.name: one.name for one in self.names.stacked if not one.is_param}
        alone = {p: name for p, name in mode.params.items() if name not in inside} | stacked
        single = {p: name for p, name in mode.buffers.items() if name not in inside} | kept
        values: dict[str, Any] = {**inputs, **mode.constants}
        values |= rolled.known_sizes(mode.sizes(inputs))
        read_as = frozen_dtypes(self.names.of_entries(mode.param_dtypes), self.frozen)
        values |= bind_state(alone, params, self._params, "params", self.frozen, read_as)
        casts = self.names.of_entries(mode.buffer_dtypes)
        values |= bind_state(single, buffers, self._buffers, "buffers", frozenset(), casts)
        return rolled.run(values, values, rng)

    def _bind_leaves(self, mode: Mode, params: Arrays, buffers: Arrays) -> dict[str, Any]:
        """Values of the unrolled graph's placeholders, from leaves under their own names."""
        shapes = {leaf.name: leaf for leaf in self.layout.leaves}
        frozen = frozenset(leaf.name for leaf in self.layout.leaves if leaf.frozen)
        read_as = frozen_dtypes(mode.param_dtypes, frozen)
        values = bind_state(mode.params, params, shapes, "params", frozen, read_as)
        casts = mode.buffer_dtypes
        values.update(bind_state(mode.buffers, buffers, shapes, "buffers", frozenset(), casts))
        values.update(mode.constants)
        return values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output in eval mode, with its initial values; for trained ones see `apply`.

        Other shapes are another program, compiled when they first come.

        Example:
            >>> import jax, torch
            >>> from torch_bridge import convert
            >>> convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))(torch.zeros(5, 3)).shape
            (5, 2)
        """
        call = self._graphs.call(False, args, kwargs)
        leaves = self._programs.run(self._evaluated, call, self.params, self.buffers)
        return build_output(call.mode.out_spec, leaves)

    def _evaluated(self, call: Call, params: Arrays, buffers: Arrays) -> list[Any]:
        return self._run(call, params, buffers, None, False)[0]

    @cached_property
    def _programs(self) -> CallPrograms:
        return CallPrograms()

    def by_name(self, tree: Any) -> dict[str, Any]:
        """Params or buffers of a state under the `state_dict` names of the module's own leaves."""
        return self.names.unstack(links_merged(tree))

    def by_initial(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Initial values under the names of the module's own leaves, read when they are needed."""
        return self.names.unstack(self._params), self.names.unstack(self._buffers)

    def with_values(self, leaves: Arrays) -> Converted:
        """The same with other initial values of some of the module's own leaves."""
        params, buffers = self.by_initial()
        params = {name: leaves.get(name, value) for name, value in params.items()}
        buffers = {name: leaves.get(name, value) for name, value in buffers.items()}
        made = self.by_layer(params, buffers)
        return replace(self, _params=made[0], _buffers=made[1])

    def entries(self) -> dict[str, tuple[str, ...]]:
        """Names of the module's own leaves that each entry of `params` holds."""
        own = {one.name: tuple(leaf.name for leaf in one.leaves) for one in self.names.stacked}
        return {name: own.get(name, (name,)) for name in self._params}

    def read_leaves(self) -> frozenset[str]:
        """Names of the module's own leaves that a forward reads."""
        read = (leaf for mode in self._modes.values() for leaf in mode.params.values())
        return frozenset(read)

    def reached(self) -> frozenset[str]:
        """Names of the module's own leaves that gradients reach in train mode, frozen ones too."""
        mode = self._modes[max(self._modes)]
        return frozenset(reached_params(mode, mode.graph.outputs))

    @property
    def written(self) -> frozenset[str]:
        """Names of the module's own buffers that a forward writes to."""
        names = self.layout.leaf_of()
        return frozenset(names[n].name for m in self._modes.values() for n in m.graph.mutations)

    def by_layer(self, params: Arrays, buffers: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        """Leaves under their own names as `self.params` and `self.buffers` have them."""
        return self.names.stack(params), self.names.stack(buffers)

    def by_link(self, params: Arrays, buffers: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values as `self.params` and `self.buffers` have them, as the chain of `model` has them.

        So `model.with_init(converted.by_link(*tb.load_state_dict(converted, mapping)))` starts from
        other weights.
        """
        chain = self._chain()
        return chain.by_link(self.trained(params)), chain.by_link(buffers)

    def trained(self, params: Arrays) -> dict[str, Any]:
        """Parameters as `model` trains them: with `masters`, those of 16 bits are widened."""
        return with_masters(params, self.frozen) if self.masters else dict(params)

    def fixed_dims(self) -> tuple[str, ...]:
        """The dims of tensor arguments that the graphs have as in the example.

        All others are free. Another size of these is another graph, which is traced when it first
        comes, if the module takes it.

        Returns:
            Names such as "`input` dim 1", in the order of the arguments.

        Example:
            >>> import jax, torch
            >>> from torch_bridge import convert
            >>> convert(torch.nn.Linear(3, 2), torch.zeros(4, 3)).fixed_dims()
            ('`input` dim 1',)
        """
        found: dict[str, None] = {}
        for mode in self._modes.values():
            found.update(dict.fromkeys(mode.shapes.fixed()))
        return tuple(found)

    def model(
        self,
        loss: Callable[..., Any] | str,
        *,
        inputs: Callable[[Any], Any] | None = None,
        outputs: Callable[[Any], Any] | None = None,
        chain: bool | None = None,
        buffer_reduce: Mapping[str, str] | None = None,
    ) -> Model:
        """The module with a loss, as fzero trains and evaluates it.

        Where blocks were rolled it is a `fz.Sequential`: the part before the blocks, a `fz.Stack`
        of them, the part after. ZeRO-3 then gathers it layer by layer, and `Plan(pipe=...)` cuts
        it anywhere. Its params are `{link: {name: array}}`, with the names of `self.params`.

        Args:
            loss: `loss(forward, batch)`, which returns an `fzero.Mean` or a scalar, or a pair of
                that and a dict of metrics. `forward(*args, **kwargs)` is the module with the
                step's parameters, buffers, key and mode bound; called several times, each call
                has its own randomness and sees the buffers that the one before left, for which a
                forward that writes or draws is called as it is, or within `jax.grad`. What the loss
                reads of the batch is as it came. A chain runs the module once: there, `forward` is
                called once, as it is (within `jax.checkpoint` or `jax.jit`, but not mapped nor
                differentiated).
                `"module"`: the module returns its own loss for a batch (transformers: where it has
                `labels`), as `loss`, as the only output or the first one; a batch holds what it is
                called with. That is a mean over the rows of one device, which all count alike.
            inputs: `inputs(batch)`, what the module is called with: a dict of keyword arguments, a
                tuple of positional ones, a pair of both, or the one argument. The loss is then
                `loss(output, batch)`.
            outputs: `outputs(output)`, what of the module's output `fz.predict_step` gives, each
                array with a row for each example. By default all of its arrays, but for the loss
                of `"module"`. What the module is called with is what `inputs` says, or else what
                the loss calls `forward` with: that loss is then traced (and not computed), so that
                batches have all that it reads.
            chain: whether to make a chain; the default is to do so where blocks were rolled.
                `False` gives one function, for losses that call `forward` several times; its
                params are those of `self.params`, and the rolled blocks a loop in it.
            buffer_reduce: how devices' values of a buffer become one, by its name among
                `self.buffers`, as `fz.Model` has it.

        Returns:
            A `Model` whose initial values are this module's.

        Raises:
            ConversionError: `chain=True` for a module in which nothing was rolled, or a
                `buffer_reduce` of no buffer.

        Example:
            >>> import jax, torch
            >>> from torch_bridge import convert
            >>> import jax.numpy as jnp
            >>> converted = convert(torch.nn.Linear(3, 1), torch.zeros(4, 3))
            >>> model = converted.model(lambda forward, batch: jnp.mean(forward(batch) ** 2))
            >>> value, buffers, metrics = model.loss(*model.init, jnp.ones((2, 3)), None, True)
            >>> value.shape, buffers, metrics
            ((), {}, {})
        """
        if isinstance(loss, str):
            if loss != "module":
                raise ConversionError(f'model: loss={loss!r}: expected a function or "module"')
            loss, inputs = module_loss, inputs or called_with_batch
            outputs = outputs or all_but_the_loss
        require_of_jax(loss)
        predicting, same = _predicting(loss, inputs, outputs or _all), self._reduced(buffer_reduce)
        if inputs is not None:
            loss = of_output(loss, inputs)
        if chain or (chain is None and self._rolled):
            if not self._rolled:
                raise ConversionError(
                    f"nothing to make a chain of: {self.blocks}; for a torch.nn.Sequential see"
                    " tb.sequential"
                )
            return self._chain(same).model(loss, predicting)

        def step_loss(
            params: Arrays, buffers: Arrays, batch: Any, rng: Any, train: bool, _ctx: Any = None
        ) -> tuple[Any, Any, dict[str, Any]]:
            computed = self._computed(params, _ctx)
            if train:
                self.unread(loss, batch)

            def apply(buffers: Arrays, args: Any, kwargs: Any, key: Any) -> Applied:
                return self._applied(computed, params, buffers, args, kwargs, key, train)

            forward = calls(apply, buffers, rng, train and self.within_capacity)
            with tensors_told():
                return finished(forward, loss(forward, batch))

        initial = self.trained(self._params), dict(self._buffers)
        predict = partial(self._predict, predicting)
        return Model(initial, step_loss, self.frozen, same, predict, self._whole_shard())

    def unread(self, loss: Callable[..., Any], batch: Any) -> frozenset[str]:
        """Names of leaves that only outputs read which a loss does not; a warning says them.

        Args:
            loss: `loss(forward, batch)`. Of one that calls `forward` several times nothing is said.
            batch: what it is given.
        """
        if not may_be_unread(self._modes[max(self._modes)]):
            return frozenset()
        try:
            return find_call(loss, batch, self._graphs, max(self._modes), None).unread
        except NotOneCallError:
            return frozenset()

    def _whole_shard(self) -> Shard:
        """The rules of `parallel` for leaves that are no layer of a stack."""
        stacked = {one.name for one in self.names.stacked}
        rules = self.parallel.shard.items()
        return {name: (None, *dims) if name in stacked else dims for name, dims in rules}

    def _predict(
        self,
        predicting: FindCall,
        params: Arrays,
        buffers: Arrays,
        batch: Any,
        rng: Any,
        _ctx: Any = None,
    ) -> Any:
        """`fz.Model`'s `predict`."""
        found = predicting(batch, self._graphs, False, self._computed(params, _ctx))
        key = None if rng is None else jax.random.fold_in(rng, 0)  # as the loss's first call
        leaves, _ = self._run(found.call, params, buffers, key, False)
        return found.finish(leaves)

    def _computed(self, params: Arrays, ctx: Context | None) -> Computed | None:
        """What a step's parameters are in, if it is not their own dtype."""
        if ctx is None or not ctx.keep_fp32:
            return self._graphs.dtype_of(params)
        return Computed(
            np.dtype(ctx.dtype), self._graphs.float32(ctx, {name: name for name in params})
        )

    def _reduced(self, said: Mapping[str, str] | None = None) -> dict[str, str]:
        """`fz.Model`'s `buffer_reduce`: what is said, and integers that no forward writes, or that
        count steps, are the same."""
        if unknown := sorted(set(said or ()).difference(self._buffers)):
            raise ConversionError(
                f"buffer_reduce names {unknown[0]!r}, which is no buffer; there are"
                f" {sorted(self._buffers)}"
            )
        written = self.written.union(*(rolled.written for rolled in self._rolled.values()))
        counts = {leaf.name for leaf in self.layout.leaves if leaf.counts_batches}
        return {
            name: "same"
            for name, value in self._buffers.items()
            if not is_float(value) and (name not in written or name in counts)
        } | dict(said or {})

    def _chain(self, same: Mapping[str, str] | None = None) -> Chain:
        params = self.trained(self._params)
        graphs, shard = self._graphs, self.parallel.shard
        return Chain(graphs, params, self._buffers, self.names, self.frozen, same or {}, shard)


def _predicting(
    loss: Callable[..., Any], inputs: Callable[[Any], Any] | None, outputs: Callable[[Any], Any]
) -> FindCall:
    """What `fz.predict_step` runs; of a loss of the output nothing is wanted."""
    if inputs is None:
        return partial(predicted, loss, False, outputs)
    return partial(predicted, of_output(lambda *_: 0.0, inputs), True, outputs)


def _all(output: Any) -> Any:
    return output
