"""The code of an effect in sealed processes: a recipe's model, with an operator or a kernel in some of its places.

It is a part of the sources that :mod:`kqueue.features.effect.effects` generates. Each process finds the places in the
same way, so none needs names from another.
"""

import copy
import functools
import json
import linecache
import math
import types

import torch

#: Largest difference of a module's answer from the operator's in fp32, relative to the largest value.
_SAME = 3e-5
#: Values of a drift's second output: of the reference, and of the model with the kernel.
REFERENCE, KERNEL = 1, 2


class Parts:
    """A recipe, and the problem's source for each of its shapes. None of it runs before a model is made."""

    def __init__(self, recipe, problems):
        self._sources = recipe, problems
        #: Shape, mean and standard deviation of each input of the operator's first place.
        self.like = []

    @functools.cached_property
    def modules(self):
        """The recipe's module, and the problem's modules."""
        recipe, problems = self._sources
        return _imported("recipe", recipe), [_imported("operator", one) for one in problems]

    def get_inputs(self):
        """Return the recipe's inputs."""
        return self.modules[0].get_inputs()

    def get_operator_inputs(self):
        """Return inputs like the inputs of the operator in the model."""
        return [mean + deviation * torch.randn(shape) for shape, mean, deviation in self.like]

    def model(self, kernel=None, *, twice=False, mark=0, alone=False):
        """Return the class of a model: with a kernel, or with each call of the operator made twice.

        ``mark`` is the value of a second output, or 0 for none. If ``alone``, the first place is the whole model.
        """
        return type("Model", (_Effect,), {"parts": self, "how": (kernel, twice, mark, alone)})

    def check(self, reference_outputs, outputs, inputs):
        """Return whether outputs are the reference's, or the drift of the model with the kernel in JSON."""
        (logits, _), (found, mark) = reference_outputs, outputs
        if int(mark) != KERNEL:
            far, usual = (float(one.double().square().mean()) for one in (found - logits, logits))
            return int(mark) == REFERENCE and far <= 0.05**2 * usual  # CHECK_BOUND of the problem
        model = _Effect.latest
        return json.dumps(
            model.facts | {"kernel": _distance(logits, found), "own": _distance(model.wide(inputs), logits)}
        )


class _Effect(torch.nn.Module):
    """A recipe's model, whose operator has the weights of the problem's constructor, like a kernel."""

    #: The model whose forward was called last.
    latest = None

    def __init__(self):
        super().__init__()
        kernel, twice, self.mark, alone = self.how
        recipe, problems = self.parts.modules
        seed = torch.initial_seed()
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            self.model = _made(recipe.Model, _initial(recipe))
            places = _places(self.model, recipe.get_inputs(), problems)
        calls = [call for place in places for call in place.calls]
        self.facts = {"places": len(places), "calls": len(calls), "shapes": sorted(set(map(_words, calls)))[:4]}
        self.parts.like = [(one.shape, float(one.mean()), float(one.std())) for one in places[0].tensors]
        self._wide = []
        for number, place in enumerate(places, 1):
            # As for a kernel alone: the same seed before the arguments and before both constructors.
            made = []
            for kind in filter(None, (place.problem.Model, kernel)):
                torch.manual_seed((seed + number) % 2**63)
                arguments = _initial(place.problem)
                torch.manual_seed((seed + number) % 2**63)
                made.append(_made(kind, arguments))
            _copy(made[0], place.module)
            new = place.module
            if kernel is not None:
                new = _Kernel(made[1], place)
                for children in [parent._modules for parent in self.model.modules()]:
                    children.update((name, new) for name, child in list(children.items()) if child is place.module)
            elif twice:
                new.forward = _doubled(new.forward)
            if alone:
                self.model = new
                break

    def setup(self):
        """Call the setup that a kernel declares, in each place."""
        for module in list(self.model.modules()):
            setup = getattr(type(getattr(module, "kernel", None)), "setup", None)
            if isinstance(module, _Kernel) and isinstance(setup, types.FunctionType):
                module.kernel.setup(*module.empty[: setup.__code__.co_argcount - 1])

    def forward(self, *arguments, **keywords):
        """Return the logits, and the mark."""
        logits = self.model(*arguments, **keywords)
        if not self.mark:
            return logits
        _Effect.latest = self
        if self.mark == REFERENCE:
            self.wide(keywords or arguments)  # The first call decides how much memory the process can use.
        return logits, torch.full((1,), self.mark, device=logits.device)

    def wide(self, inputs):
        """Return the logits with the same weights in fp32."""
        if not self._wide:
            self._wide.append(copy.deepcopy(self.model).float())
        named = inputs if isinstance(inputs, dict) else dict(enumerate(inputs))
        floats = [torch.is_tensor(value) and value.is_floating_point() for value in named.values()]
        wide = [value.float() if is_float else value for value, is_float in zip(named.values(), floats)]
        return self._wide[0](**dict(zip(named, wide))) if isinstance(inputs, dict) else self._wide[0](*wide)


class _Kernel(torch.nn.Module):
    """A kernel in a place."""

    def __init__(self, kernel, place):
        super().__init__()
        self.kernel = kernel
        self._place = place.name, place.ranks, place.answers
        self.empty = _joined([torch.empty(shape, device="meta") for shape in place.calls[0]], place.ranks)

    def forward(self, *arguments, **keywords):
        """Call the kernel. The text of an exception gets the place."""
        name, ranks, answers = self._place
        tensors = [*arguments, *keywords.values()]
        shapes = _words(tensor.shape for tensor in tensors)
        try:
            output = _parted(self.kernel(*_joined(tensors, ranks)), tensors, ranks)
            if output.shape != (due := answers.get(shapes, output.shape)):
                raise ValueError(f"the kernel returned {_words([output.shape])} instead of {_words([due])}")
        except Exception as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (f"{error.args[0]} (in {name}, called with {shapes})", *error.args[1:])
            raise
        return output


def _doubled(call):
    def calls(*arguments, **keywords):
        call(*arguments, **keywords)
        return call(*arguments, **keywords)

    return calls


class _Place:
    """A module whose weights fit operators, each with its problem and the shapes of its inputs."""

    def __init__(self, name, module, fitting):
        self.name, self.module, self.fitting = name, module, fitting
        self.problem, self.ranks = fitting[0][0], [len(shape) for shape in fitting[0][2]]
        self.calls, self.answers, self.tensors, self.output = [], {}, [], None

    def called(self, _, arguments, keywords, output):
        """Note the shapes of a call, and the first inputs and output."""
        tensors = [*arguments, *keywords.values()]
        if tensors and all(map(torch.is_tensor, (*tensors, output))):
            self.calls.append(_shapes(tensors))
            self.answers[_words(self.calls[-1])] = output.shape
            if self.output is None:
                self.tensors, self.output = [tensor.clone() for tensor in tensors], output.clone()

    def distance(self):
        """Return the distance of the operator's answer from the module's, relative to the largest value."""
        operator = self.fitting[0][1]
        try:
            _copy(self.module, operator)
            answer = _parted(operator(*_joined(self.tensors, self.ranks)), self.tensors, self.ranks)
            return float((answer - self.output).abs().max() / self.output.abs().max().clamp(min=1e-30))
        except Exception:  # noqa: BLE001 -- such a module is another operator
            return math.inf

    def check(self):
        """Refuse calls with other shapes than those between the problem's smallest and largest ones."""
        for call in self.calls:
            given = _shapes(_joined([torch.empty(shape, device="meta") for shape in call], self.ranks))
            known = [shapes for _, _, shapes in self.fitting if list(map(len, shapes)) == list(map(len, given))]
            sizes = [size for shape, some in zip(given, zip(*known)) for size in zip(shape, *some)]
            if not known or any(not min(some) <= n <= max(some) for n, *some in sizes):
                due = " or ".join(_words(shapes) for _, _, shapes in self.fitting)
                call = f"{self.name} is called with {_words(given)}, and the problem has {due}"
                raise LookupError(f"the model calls the operator with shapes outside the problem's SHAPES: {call}")
            self.problem = next((one for one, _, shapes in self.fitting if shapes == given), self.problem)


def _places(model, inputs, problems):
    """Return the places of an operator: modules that give the same answers in fp32. Raise LookupError if unusable."""
    operators = [(one, _made(one.Model, _initial(one)), _shapes(one.get_inputs())) for one in problems]
    named = [(name, module) for name, module in model.named_modules() if name]
    fitting = [[one for one in operators if _pairs(one[1], module) is not None] for _, module in named]
    places = [_Place(*one, some) for one, some in zip(named, fitting) if some]
    hooks = [place.module.register_forward_hook(place.called, with_kwargs=True) for place in places]
    model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    for hook in hooks:
        hook.remove()
    found, near = [], []
    for place in (place for place in places if place.calls):
        if not any(place.name.startswith(f"{other.name}.") for other in found):
            far = place.distance()
            found += [place] * (far <= _SAME)
            near += [f"{place.name} ({type(place.module).__name__}) differs by {far:.1g}"] * (_SAME < far < 1)
    if not found:
        weights = _words(weight.shape for weight in operators[0][1].parameters()) or "none"
        why = f"{len(places)} modules have weights of its shapes ({weights}), and none answers as it does"
        closest = f". Relative to the largest value, {', '.join(near[:3])}" if near else ""
        raise LookupError(f"the problem's operator never occurs in the model: {why}{closest}")
    for place in found:
        place.check()
    return found


def _imported(name, source):
    """Return a new module with a source, whose lines tracebacks show."""
    module, file = types.ModuleType(name), f"{name}.py"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), vars(module))  # noqa: S102 -- in a sealed process
    return module


def _initial(module):
    return module.get_init_inputs() if hasattr(module, "get_init_inputs") else []


def _made(kind, given):
    """Return an object of a class with arguments in the forms of `get_init_inputs()`."""
    if isinstance(given, dict):
        return kind(**given)
    is_split = len(given) == 2 and isinstance(given[0], list) and isinstance(given[1], dict)
    return kind(*given[0], **given[1]) if is_split else kind(*given)


def _shapes(given):
    """Return the shapes of the tensors among a call's arguments."""
    return [tuple(one.shape) for one in (given.values() if isinstance(given, dict) else given) if torch.is_tensor(one)]


def _joined(tensors, ranks):
    """Return tensors whose first dimensions are joined, so that they have as many as the operator's inputs."""
    pairs = zip(tensors, ranks, strict=True)
    return [one.flatten(0, one.dim() - rank) if one.dim() > rank else one for one, rank in pairs]


def _parted(output, tensors, ranks):
    """Return an output with the dimensions that were joined."""
    joined = tensors[0].shape[: tensors[0].dim() - ranks[0] + 1]
    return output.reshape(*joined, *output.shape[1:]) if len(joined) > 1 else output


def _pairs(module, other):
    """Return the pairs of weights of two modules, by name or else by position. None if they do not fit."""
    named, others = dict(module.named_parameters()), dict(other.named_parameters())
    if len(named) != len(others):
        return None
    same = [others[name] for name in named] if named.keys() == others.keys() else others.values()
    pairs = list(zip(named.values(), same, strict=True))
    return pairs if all(one.shape == two.shape for one, two in pairs) else None


def _copy(source, target):
    for weight, other in _pairs(source, target):
        other.data.copy_(weight)


def _words(shapes):
    return ", ".join(" x ".join(map(str, shape)) for shape in shapes)


def _distance(logits, others):
    """Return how far two distributions at each position are."""
    true, other = (one.double().flatten(0, -2) for one in (logits, others))
    largest, usual = float((true - other).abs().max()), float(true.square().mean().sqrt())
    changed = int((true.argmax(-1) != other.argmax(-1)).sum())
    true, other = true.log_softmax(-1), other.log_softmax(-1)
    kl = max(0.0, float((true.exp() * (true - other)).sum(-1).mean()))
    return {"tops": len(true), "changed": changed, "kl": kl, "largest": largest, "usual": usual}
