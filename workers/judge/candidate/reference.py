"""The harness of a reference: it loads a problem's source, draws inputs, and computes the reference outputs.

Source of the problem's form: KernelBench (``class Model``, ``get_inputs()``, ``get_init_inputs()``).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import mmap
import random
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from workers.judge.candidate import failures, gradients, memory, variants
from workers.judge.candidate.harness import Harness, ProblemError
from workers.judge.candidate.instance import (
    Instance,
    default_dtype,
    evaluating,
    is_plain,
    lasting_of,
    modules_of,
    state_of,
    value_of,
    weights_of,
)
from workers.judge.channel import arguments as call_arguments
from workers.judge.channel import scalar_page
from workers.judge.channel.arena import Arena
from workers.judge.channel.arguments import FORM, LEAF, STEADY, ArgumentsError, leaves, of_constructor, take_apart
from workers.judge.channel.bits import checksum, differ, same_bits
from workers.judge.channel.buffers import OpenedBuffer, is_apart
from workers.judge.channel.layout import put_back, refusal, taken_apart
from workers.judge.channel.orders import Ask, Draw, Gradients, Order, Release
from workers.judge.channel.protocol import Answer, Reply, Tag
from workers.judge.channel.randomness import set_seed
from workers.judge.channel.tensors import LASTING, MAX_TENSORS, SHARED, Location, TensorSpec, View, widened
from workers.judge.channel.wire import Command

#: Unused GPU memory in bytes that torch can cache during an evaluation. The candidate needs memory too.
_CACHED_BYTES: Final = 1 << 30
#: Total size in bytes up to which inputs are copied, because the problem can reuse its own tensors.
_COPIED_BYTES: Final = 64 << 20
#: Maximum number of changed buffers and parameters of which each answer has the values. Of more, as in deep networks, a
#: random choice is compared. Below: maximum size in bytes of those that are copied to find out which change. The rest
#: has checksums, and cannot be reset or compared.
_MOST_BUFFERS: Final = 12
_STATE_BYTES: Final = {"cpu": 64 << 20, "cuda": 1 << 30}
#: Maximum number of gradients that each answer has. Of more, a random choice is compared.
_MOST_GRADIENTS: Final = 16
#: Part of torch's message if autograd is used outside of grad mode.
_NEEDS_GRAD: Final = "does not require grad"
_ANSWERS: Final = "For any outputs it must return True, False, or a text that names the fault, empty for none"


def _differs(now: Any, before: torch.Tensor | int) -> bool | torch.Tensor:
    """Return whether a value differs from a copy or a checksum. On a GPU the former does not wait for the device."""
    if not is_plain(now) or isinstance(before, int):
        return not is_plain(now) or checksum(now.detach()) != before
    return TensorSpec.of(now) != TensorSpec.of(before) or differ(now.detach(), before)


@dataclass(frozen=True, slots=True)
class _Form:
    """The arrangement of a call's arguments, and the tensors among them as views of the tensors of an input set."""

    arguments: Any
    views: list[View]

    def words(self) -> Iterator[str]:
        """Yield each value as text, of a tensor the shape and the strides."""
        views = iter(self.views)
        for path, value in leaves(self.arguments, "inputs"):
            view = next(views) if value is LEAF else None
            yield f"{path} = {f'a tensor of shape {view.shape}, strides {view.stride}' if view else repr(value)}"


@dataclass(slots=True)
class _Set:
    """An input set that the judge has not released: parameters of the draw, form of the arguments and their tensors.

    ``answers`` are the outputs for this set that the judge has not read yet.
    """

    seed: int
    on_device: bool
    form: _Form
    inputs: list[torch.Tensor]
    answers: list[torch.Tensor] = field(default_factory=list[torch.Tensor])


class ReferenceHarness(Harness):
    """The harness of one problem."""

    holds_sets = True

    def __init__(self, page: memoryview[int], directory: Path | None = None) -> None:
        super().__init__(page, directory)
        self._scalar_page: mmap.mmap
        self._get_inputs: Any
        self._get_init_inputs: Any
        self._checker: Any
        self._sets: dict[int, _Set] = {}
        self._form: _Form | None = None
        self._variants: variants.Variants | None = None
        self._arena: Arena | None = None
        #: Names of the buffers and parameters that forward changes and that cannot be compared.
        self._unwatched: list[str] = []
        #: Numbers of the inputs that forward has changed. Once it changed one, it gets copies.
        self._mutated: set[int] = set()
        #: Numbers of those that its first call changed, which are a part of each answer. None before the first call.
        self._effects: list[int] | None = None
        self._has_warmed_up = False
        #: Whether forward uses autograd, which needs grad mode.
        self._differentiates = False
        #: Gradients of each call, and forms of the upstream gradients that are drawn with the inputs. None for none.
        self._gradients: Gradients | None = None
        self._upstream: list[TensorSpec] = []
        #: Least CPU time in seconds of drawing an input set and of a forward, also in earlier evaluations.
        self._cpu_s: dict[str, float]
        #: Copy of the model in float64, for inputs in float64.
        self._wide = Instance()
        self.orders |= {
            Order.INITIAL: self._initial,
            Order.TAKEN: self._taken,
            Order.DRAW: self._draw,
            Order.RELEASE: self._release,
            Order.WIDEN: self._widen,
            Order.DIFFERENTIATE: self._differentiate,
            Order.EFFECTS: self._find_effects,
            Order.ARENA: self._take_arena,
            Order.ANSWER: self._answer,
            Order.CHECK: self._check,
        }

    def take_module(self, module: Any) -> None:
        """Take the problem's model and its functions from the imported module."""
        if not isinstance(getattr(module, "Model", None), type) or not issubclass(module.Model, torch.nn.Module):
            raise ProblemError("the problem defines no class Model derived from torch.nn.Module")
        super().take_module(module)
        self._cpu_s = {"draw_s": math.inf, "call_s": math.inf}
        self._get_inputs = getattr(module, "get_inputs", None)
        self._get_init_inputs = getattr(module, "get_init_inputs", None)
        self._checker = getattr(module, "check", None)
        if not callable(self._get_inputs):
            raise ProblemError("the problem defines no function get_inputs()")

    def _initial(self, command: Command) -> Reply:
        for descriptor in command.descriptors:
            self._scalar_page = mmap.mmap(descriptor, scalar_page.SIZE)
        self.own.model = None
        self._job = replace(self._job, seed=command.seed)
        torch.manual_seed(self._job.seed)
        with self.on_host():
            returned = self._get_init_inputs() if callable(self._get_init_inputs) else []
        try:
            arguments = of_constructor(returned, self._class)
        except ArgumentsError as error:
            raise ProblemError(str(error)) from None
        self._tell(arguments, "get_init_inputs()")
        return self.done(command)

    def _taken(self, command: Command) -> Reply:
        weights = sum(weight.nbytes for weight in weights_of(self.own.model))
        peak = torch.cuda.max_memory_reserved() if self.on_gpu else 0
        drawn = self._variants.drawn if self._variants is not None else 0
        sizes = {"weights": weights, "peak": peak, "drawn": drawn, **self._cpu_s}
        initial = [checksum(kept[2]) for kept in self.own.kept[: self.own.compared] if kept is not None]
        state = {"resets": list(self.own.resets), "initial": initial, "unwatched": self._unwatched}
        self._tell(sizes | state, "the problem")
        return self.done(command)

    def _draw(self, command: Command) -> Reply:
        """Draw input sets with the judge's seeds."""
        order: Draw = command.payload
        self._give_memory_back()
        self._drop(order.free)
        leaves: list[torch.Tensor] = []
        if order.kind:
            assert self._form is not None, "the judge asks for variants of an input set"
            [seed] = order.seeds
            made = self._vary(seed, order)
            if made is None:
                return Reply(Answer.MISMATCH, command.sequence)
            self._sets[order.slots[0]] = _Set(seed, order.on_device, self._form, made)
            leaves = made
        else:
            for slot, seed in zip(order.slots, order.seeds, strict=True):
                now, tensors = self._inputs(seed, on_device=order.on_device)
                if self._form is None:
                    self._form = now
                elif repr(now) != repr(self._form):
                    both = zip(self._form.words(), now.words(), strict=False)
                    changed = (f"It returned {was}, and then {new}" for was, new in both if was != new)
                    raise ProblemError(f"{STEADY}. {next(changed, 'Its views or lists differ')}")
                self._sets[slot] = _Set(seed, order.on_device, now, self._own(tensors))
                leaves += self._sets[slot].inputs
        assert self._form is not None
        views = [tuple(view) for view in self._form.views]
        self._tell({"arguments": self._form.arguments, "views": views}, "get_inputs()")
        self.settle()
        locations = tuple(self._held_at(leaf)[0] if self.can_locate(leaf) else Location() for leaf in leaves)
        specs = tuple(TensorSpec.of(leaf) for leaf in leaves)
        return Reply(Answer.DONE, command.sequence, tensors=specs, locations=locations)

    def _warm_up(self, command: Command) -> Reply:
        """Load once the GPU code that variants of large inputs need."""
        if not self._has_warmed_up:
            variants.warm_up(self.device, self._job.dtype)
            self.settle()
            self._has_warmed_up = True
        return self.done(command)

    def _own(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return inputs in the form for calls: each in separate memory."""
        few = sum(tensor.nbytes for tensor in tensors) <= _COPIED_BYTES
        seen: set[int] = set()
        owned: list[torch.Tensor] = []
        for tensor in tensors:
            kept = self._arena.keep(tensor) if few and self._arena is not None else None
            if kept is not None:
                owned.append(kept)
                continue
            where = tensor.untyped_storage().data_ptr()
            if few or where in seen or tensor.storage_offset():
                tensor = tensor.clone()
            seen.add(where)
            owned.append(tensor)
        return owned

    def _vary(self, seed: int, order: Draw) -> list[torch.Tensor] | None:
        """Make a variant of the inputs of a seed, or return None if the problem's code does not support it."""
        try:
            if self._variants is None or self._variants.seed != seed:
                self._variants = variants.Variants(
                    lambda seed: self._inputs(seed, on_device=order.on_device)[1], seed, seed ^ 1, self._job.dtype
                )
            made = self._variants.make(order.kind, order.position)
            if made is None:
                return None
            made = self._own(made)
            self.settle()
        except Exception:  # noqa: BLE001 -- the problem can raise anything
            traceback.print_exc()
            return None
        return made

    def _inputs(self, seed: int, *, on_device: bool) -> tuple[_Form, list[torch.Tensor]]:
        """Return the form of a call's arguments, and the dense tensors of which they consist on the device."""
        set_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        where = torch.device(self.device) if on_device else contextlib.nullcontext()
        with where, self.on_host(), self._timed("draw_s"):
            values = self._get_inputs()
            values = list(values) if inspect.isgenerator(values) else values
            if self._upstream:
                set_seed(seed ^ 1)  # get_inputs() can have set another seed.
            upstream = [gradients.upstream(spec) for spec in self._upstream]
        try:
            arrangement, tensors = take_apart(values)
        except ArgumentsError as error:
            raise ProblemError(f"{FORM}. It returned {error}") from None
        if len(tensors) > MAX_TENSORS:
            raise ProblemError(f"get_inputs() returned {len(tensors)} tensors, and at most {MAX_TENSORS} are possible")
        for number, tensor in enumerate(tensors):
            if reason := refusal(tensor):
                raise ProblemError(f"get_inputs() returned as input {number} {reason}")
        roots, views = taken_apart([tensor.detach().resolve_conj().resolve_neg() for tensor in tensors])
        marked = [tensor.requires_grad for tensor in tensors] if self._gradients is None else gradients.marks(tensors)
        views = [view._replace(requires_grad=needs) for view, needs in zip(views, marked, strict=True)]
        roots = [self.to_device(root) for root in roots]
        if upstream:
            arrangement = [arrangement, [LEAF] * len(upstream)]
            views += [View(len(roots) + i, 0, tuple(one.shape), one.stride()) for i, one in enumerate(upstream)]
            roots += [one.to(self.device) for one in upstream]
        return _Form(arrangement, views), roots

    def on_host(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a problem that names a GPU makes its tensors on the CPU, where there is no GPU."""
        return contextlib.nullcontext() if self.on_gpu else variants.OnHost()

    def _construct(self, command: Command) -> Reply:
        reply = super()._construct(command)
        self.set_tf32()  # the evaluation's setting overrides the problem's
        return reply

    def _release(self, command: Command) -> Reply:
        order: Release = command.payload
        self._drop(tuple(self._sets) if order.all else order.slots)
        self.settle()
        if order.all:
            self._variants = None
            self._close_arena()
        if order.all and self.on_gpu:
            self.exports.forget()
            torch.cuda.empty_cache()
        return self.done(command)

    def _give_memory_back(self) -> None:
        """Have the C library return large tensors that are freed from now on. Only timed calls need kept memory."""
        if not self.on_gpu:
            memory.keep_host_memory(keeps=False)

    def _drop(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            if (held := self._sets.pop(slot, None)) is not None:
                self._forget([*held.inputs, *held.answers])

    def _take_arena(self, command: Command) -> Reply:
        [descriptor] = command.descriptors
        self._close_arena()
        self._arena = Arena(OpenedBuffer(command.payload, descriptor))
        return self.done(command)

    def _close_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _held_at(self, leaf: torch.Tensor) -> tuple[Location, torch.Tensor]:
        """Return a tensor's location and the tensor there, which is a copy in the arena if the arena has room."""
        if self._arena is not None and is_apart(leaf.shape, leaf.stride()):
            location = self._arena.location(leaf)
            if location is None and (kept := self._arena.keep(leaf)) is not None:
                leaf, location = kept, self._arena.location(kept)
            if location is not None:
                return location, leaf
        return self.locate(leaf)

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        if self._arena is not None:
            for tensor in tensors:
                self._arena.let_go(tensor)

    def _answer(self, command: Command) -> list[Reply]:
        # Wait for the device once, after all calls: each wait is for a time slice, which other processes use too.
        # A problem that uses several streams needs another wait before its output is copied (see _call).
        asks: tuple[Ask, ...] = command.payload
        self._give_memory_back()
        try:
            replies = [self._answer_one(command, ask) for ask in asks]
            self.settle()
            if any(ask.wide for ask in asks) and self.on_gpu:
                held_now = torch.cuda.memory_stats_as_nested_dict()
                reserved, used = (held_now[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
                if reserved - used > _CACHED_BYTES:
                    torch.cuda.empty_cache()
        except BaseException as error:  # noqa: BLE001 -- an error of the device or of the problem
            return [self.failed(command, error)] * len(asks)
        return replies

    def _answer_one(self, command: Command, ask: Ask) -> Reply:
        """Call the model on held inputs, and return where its outputs are."""
        held, usual = self._sets[ask.slot], torch.get_num_threads()
        if ask.threads is not None:
            torch.set_num_threads(ask.threads or usual + 3)  # Then races end in another order on any host.
            self._renew_memory(marks=True)
        if ask.afresh:
            self._forget(held.answers)
            held.answers.clear()
        try:
            if ask.wide or ask.nudge or ask.evaluates:
                given = self._prepared(held.inputs, ask)
                output, drew = self._call(ask, held, given)
            else:
                output, drew, given = self._call_looking(ask, held)
            reply = self._hand_over(command, ask, held, output, given, drew=drew)
            if ask.leaves:
                held.inputs.clear()
            return reply
        except BaseException as error:  # noqa: BLE001 -- the problem can raise anything, SystemExit too
            return self.failed(command, error)
        finally:
            torch.set_num_threads(usual)

    def _call_looking(self, ask: Ask, held: _Set) -> tuple[Any, bool, list[torch.Tensor]]:
        """Call the model, and also return the inputs after the call.

        If it changes its inputs, call it again with copies, and use copies from then on.
        """
        copies = bool(self._mutated) or self.is_member
        given = [tensor.clone() for tensor in held.inputs] if copies else held.inputs
        versions = [tensor._version for tensor in given]
        # Compare all values on the first call, because writes that bypass torch change no version counter.
        few = sum(tensor.nbytes for tensor in given) <= _COPIED_BYTES
        before = [tensor.clone() for tensor in given] if few and self._effects is None else given
        watch = self._watching() if self._effects is None else None
        output, drew = self._call(ask, held, given)
        changed = {
            i
            for i, (tensor, version, other) in enumerate(zip(given, versions, before, strict=True))
            if tensor._version != version or (other is not tensor and not same_bits(tensor, other))
        }
        needs_copies = changed and not copies
        self._mutated |= changed
        if watch is not None:
            self._effects = sorted(changed)
            watch(MAX_TENSORS - len(changed) - len(gradients.described(output)[1]))
        if needs_copies:
            self._restore(held)
            given = [tensor.clone() for tensor in held.inputs]
            output, drew = self._call(ask, held, given)
        return output, drew, given

    def _watching(self) -> Callable[[int], None]:
        """Return a function that finds the buffers and parameters that have changed since.

        It resets them to their values before each call from now on, and answers with some of them, at most as many as
        its argument. Of large ones only a checksum is known, so it records their names.
        """
        places, before, left = state_of(self.own.model), dict[str, torch.Tensor | int](), _STATE_BYTES[self.device]
        first = {name: value_of(*place) for name, place in places.items()}
        first = {name: value.detach() for name, value in first.items() if is_plain(value) and self.can_locate(value)}
        for name in sorted(first, key=lambda name: first[name].nbytes):
            left -= first[name].nbytes
            before[name] = checksum(first[name]) if left < 0 else first[name].clone()

        def watch(room: int) -> None:
            differs = {name: _differs(value_of(*places[name]), old) for name, old in before.items()}
            changed = [name for name, is_other in differs.items() if is_other]
            copies = {name: old for name in changed if isinstance(old := before[name], torch.Tensor)}
            self._unwatched = [name for name in changed if name not in copies]
            names = random.SystemRandom().sample(list(copies), len(copies))
            self.own.watch(tuple(names), max(0, min(_MOST_BUFFERS, len(names), room)), copies)

        return watch

    def _prepared(self, inputs: list[torch.Tensor], ask: Ask) -> list[torch.Tensor]:
        """Return the inputs as the question needs them: nudged, and in float64 or in their own dtype."""
        if ask.evaluates:
            return [tensor.clone() for tensor in inputs]
        set_seed(ask.nudge_seed)
        if ask.is_relative:
            # Inputs with gradients are no indices.
            return [variants.rounded_otherwise(tensor, ask.nudge, keep=self._gradients is None) for tensor in inputs]
        dtypes = [widened(t.dtype) if ask.wide else t.dtype for t in inputs]
        return [
            (variants.moved(t, ask.nudge) if ask.nudge else t).to(dtype)
            for t, dtype in zip(inputs, dtypes, strict=True)
        ]

    def _call(self, ask: Ask, held: _Set, tensors: list[torch.Tensor]) -> tuple[Any, bool]:
        """Return the model's output, and whether the call drew random numbers. Find out whether it needs grad mode."""
        try:
            return self._call_once(ask, held, tensors)
        except RuntimeError as error:
            if self._differentiates or _NEEDS_GRAD not in failures.text_of(error):
                raise
            self._differentiates = True
            return self._call_once(ask, held, tensors)

    def _call_once(self, ask: Ask, held: _Set, tensors: list[torch.Tensor]) -> tuple[Any, bool]:
        own = self._wide if ask.wide else self.own
        own.input_memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        if ask.wide and own.resets != self.own.resets:
            own.watch(self.own.resets, self.own.compared)
        own.reset()
        arguments = put_back(tensors, held.form.views, differentiates=self._differentiates)
        call = gradients.prepared(own.model, self._gradients, held.form.arguments, arguments, self._job.steps)
        mode = evaluating(own.model) if ask.evaluates else contextlib.nullcontext()
        grad_mode = torch.set_grad_enabled(self._differentiates)
        with default_dtype(torch.float64) if ask.wide else mode, grad_mode:
            set_seed(ask.seed)
            before = self._random_state()
            with contextlib.nullcontext() if ask.wide else self._timed("call_s"):
                output = call()
            if self.is_serial:
                self.see_launches()
            else:
                self.settle()
            return output, not torch.equal(before, self._random_state())

    @contextlib.contextmanager
    def _timed(self, what: str) -> Generator[None]:
        """Measure the CPU time of this thread, which hardly depends on the work of other processes."""
        begun = time.thread_time()
        yield
        self._cpu_s[what] = min(self._cpu_s[what], time.thread_time() - begun)

    def _restore(self, held: _Set) -> None:
        """Draw inputs again that a call changed."""
        with torch.no_grad():
            _, again = self._inputs(held.seed, on_device=held.on_device)
            for tensor, drawn in zip(held.inputs, again, strict=True):
                tensor.copy_(drawn)

    def _hand_over(
        self, command: Command, ask: Ask, held: _Set, output: Any, given: list[torch.Tensor], *, drew: bool
    ) -> Reply:
        """Return the reply with the locations of an output's tensors, whatever its structure.

        The inputs and buffers that forward changes follow, with their values after the call.
        """
        own = self._wide if ask.wide else self.own
        structure, leaves = gradients.described(output)
        if reason := next(filter(None, map(refusal, leaves)), ""):
            raise ProblemError(f"Model.forward returned {reason}")
        tensors = leaves[:MAX_TENSORS]
        locations: list[Location] = []
        lasting, memories = lasting_of(own.model), dict[int, int]()
        for i, leaf in enumerate(tensors):
            if not self.can_locate(leaf):
                locations.append(Location())
                continue
            number, storage = own.input_of(leaf), leaf.untyped_storage().data_ptr()
            first = memories.setdefault(storage, i)
            index = LASTING if storage in lasting else SHARED + first if first < i else 0
            leaf = leaf.detach().resolve_conj().resolve_neg()
            # Another call changes the model's memory.
            location, there = self._held_at(leaf.clone() if index == LASTING and own.resets else leaf)
            if ask.leaves or not any(there.data_ptr() == tensor.data_ptr() for tensor in held.inputs):
                held.answers.append(there)  # an input is held already
            locations.append(replace(location, index=index if number is None else number + 1))
        effects = self._effects or []
        if len(tensors) + len(effects) > MAX_TENSORS:
            raise ProblemError(f"Model.forward can return and change {MAX_TENSORS} tensors at most")
        for number in effects:
            location, there = self._held_at(given[number])
            held.answers.append(there)
            locations.append(replace(location, index=number + 1))
            tensors.append(given[number])
        for buffer in own.buffers():
            location, there = self._held_at(buffer.detach().clone())
            held.answers.append(there)
            locations.append(replace(location, index=LASTING))
            tensors.append(buffer)
        return Reply(
            Answer.DONE,
            command.sequence,
            structure=structure,
            tensors=tuple(TensorSpec.of(tensor) for tensor in tensors),
            locations=tuple(locations),
            drew=drew,
            differentiates=self._differentiates,
            written_bytes=0 if ask.wide else self._written(leaves),
        )

    def _check(self, command: Command) -> Reply:
        """Ask the problem's check() about outputs. It gets copies, so that it can change them."""
        slot, structure, specs = command.payload
        opened = list(map(OpenedBuffer, specs, command.descriptors))
        copies, held = [one.tensor.clone() for one in opened], self._sets[slot]
        self.unbind(opened)
        inputs = put_back([tensor.clone() for tensor in held.inputs], held.form.views)
        whole = held.form.arguments[0] if self._upstream else held.form.arguments
        positional, keywords = call_arguments.put_together(whole, inputs)
        arranged = eval(structure, {"__builtins__": {}, "Tensor": LEAF})  # noqa: S307 -- this process described it
        set_seed(command.seed)
        try:
            with torch.no_grad():
                pair, _ = call_arguments.put_together([arranged, arranged], copies)
                found = self._checker(*pair, positional or keywords)
                self.settle()
        except Exception as error:
            if failures.tag_of(error) is not Tag.OTHER:
                raise
            text = f"check() raised {type(error).__name__}: {failures.text_of(error)}"
            raise ProblemError(f"{text}. {_ANSWERS}") from error
        if type(found) not in (bool, str):
            raise ProblemError(f"check() returned a value of the type {type(found).__name__}. {_ANSWERS}")
        words = "" if found is True else found or "it returned False" * (found is False)
        return Reply(Answer.MISMATCH if words else Answer.DONE, command.sequence, message=words)

    def _written(self, outputs: list[torch.Tensor]) -> int:
        """Return the total bytes of outputs that are neither inputs nor weights. Shared memory counts once."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in weights_of(self.own.model)}
        kept |= {begin for begin, _ in self.own.input_memory}
        sizes: dict[int, int] = {}
        for leaf in outputs:
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in kept:
                where = storage.data_ptr()
                sizes[where] = max(sizes.get(where, 0), min(leaf.nbytes, storage.nbytes()))
        return sum(sizes.values())

    def _differentiate(self, command: Command) -> Reply:
        """Find the gradients that the model has, in a call that leaves its buffers unchanged."""
        slot, backward = command.payload
        own, held = self.own, self._sets[slot]
        if backward and any(map(torch.nn.parameter.is_lazy, gradients.weights_by_name(own.model).values())):
            raise ProblemError("gradients are asked for, and a lazy module has no weights before the first call")
        self._differentiates = True
        self._gradients = Gradients((), (), (), (), ())
        form, tensors = self._inputs(held.seed, on_device=held.on_device)
        named = (path for path, leaf in leaves(form.arguments, "inputs") if leaf is LEAF)
        names = [path for path, view in zip(named, form.views, strict=True) if view.requires_grad]
        given = put_back(tensors, form.views, differentiates=True)
        state = {name: value_of(*place) for name, place in state_of(own.model).items()}
        own.watch(tuple(name for name, value in state.items() if not isinstance(value, torch.nn.Parameter)), 0)
        set_seed(command.seed)
        if backward:
            self._gradients, self._upstream = gradients.learned(own.model, form.arguments, given, names)
        own.reset()
        own.watch((), 0)
        if backward and not self._gradients.delivered:
            raise ProblemError(
                "gradients are asked for, and the problem has none: its outputs must depend, by operations that"
                " autograd knows, on a floating-point input or on a parameter that requires a gradient"
            )
        # All gradients of inputs are delivered, and a random choice of the weights' gradients if there are many.
        ranks = {number: (number >= len(names), random.SystemRandom().random()) for number in self._gradients.delivered}
        some = tuple(sorted(sorted(ranks, key=ranks.__getitem__)[:_MOST_GRADIENTS]))
        self._gradients, self._form = replace(self._gradients, delivered=some), None
        self._tell(asdict(self._gradients), "the problem")
        return self.done(command)

    def _find_effects(self, command: Command) -> Reply:
        """Find the parameters without effect on the outputs."""
        held, own = self._sets[command.payload], self.own
        given = put_back([tensor.clone() for tensor in held.inputs], held.form.views, differentiates=True)
        own.reset()
        set_seed(command.seed)
        hidden = gradients.without_effect(own.model, held.form.arguments, given) if self._gradients is None else []
        return Reply(Answer.DONE, command.sequence, message="\n".join(hidden))

    def _widen(self, command: Command) -> Reply:
        """Copy the model with all its tensors in float64, including tensors in plain attributes."""
        with torch.no_grad():
            wide = copy.deepcopy(self.own.model).double()
            for module in modules_of(wide):
                for name, value in vars(module).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        setattr(module, name, value.double())
            self.settle()
        self._wide.model = wide
        return self.done(command)

    def _rest(self, command: Command) -> Reply:
        """Drop the shape's buffers, models and tensors."""
        self._sets, self._form, self._variants = {}, None, None
        self._mutated, self._effects, self._differentiates, self._unwatched = set(), None, False, []
        self._gradients, self._upstream = None, []
        self.unbind(self._wide.inputs)
        self._wide = Instance()
        self._close_arena()
        reply = super()._rest(command)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        return reply

    def _random_state(self) -> torch.Tensor:
        """Return the state of the generators, which changes when a call draws random numbers."""
        state = torch.get_rng_state()
        return torch.cat((state, torch.cuda.get_rng_state())) if self.on_gpu else state

    def _tell(self, value: Any, function: str) -> None:
        try:
            data = scalar_page.encode(value)
        except scalar_page.ScalarPageError as error:
            raise ProblemError(
                f"{function} returned {error}. It can return numbers, strings, tensors, functions and modules of"
                " torch, and their lists, tuples, sets and dicts"
            ) from None
        self._scalar_page[: len(data)] = data
