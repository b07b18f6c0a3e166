"""The code of an effect in sealed processes: a recipe's model, with an operator or a kernel in some of its places.

It is a part of the sources that :mod:`kqueue.features.effect.effects` generates. Each process finds the places in the
same way, so none needs names from another.
"""

import copy
import functools
import json
import linecache
import math
import pkgutil
import types

import torch

#: Largest difference of a call's answer from the operator's in fp32, relative to the largest value.
_SAME = 3e-5


class Parts:
    """A recipe, the problem's source for each of its shapes, the operator's path if it is a function, and the role."""

    def __init__(self, recipe, problems, operator, role):
        self._sources, self._operator, self.role = (recipe, problems), operator, role
        #: The model whose forward was called last, and tensors of the operator's first call.
        self.latest, self.like = None, []

    @functools.cached_property
    def modules(self):
        """The recipe's module, the problem's modules, and the path. No source runs before a model is made."""
        recipe, problems = self._sources
        recipe, problems = _imported("recipe", recipe), [_imported("operator", one) for one in problems]
        return recipe, problems, self._operator or getattr(recipe, "OPERATOR", "")

    def get_inputs(self):
        """Return the recipe's inputs, or inputs like the inputs of the operator in the model."""
        if self.role != "operator":
            return self.modules[0].get_inputs()
        floats = [one.is_floating_point() for one in self.like]
        return [torch.randn_like(x) * x.std() + x.mean() if some else x for x, some in zip(self.like, floats)]

    def model(self, kernel=None):
        """Return the class of the role's model, with a kernel in the places."""
        return type("Model", (_Effect,), {"parts": self, "kind": kernel})

    def check(self, reference_outputs, outputs, inputs):
        """Return whether outputs are the reference's, or the drift of the model with the kernel in JSON."""
        (logits, _), (found, mark) = reference_outputs, outputs
        if int(mark) != 2:
            far, usual = (float(one.double().square().mean()) for one in (found - logits, logits))
            return int(mark) == 1 and far <= 0.05**2 * usual  # CHECK_BOUND of the problem
        own = _distance(self.latest.wide(inputs), logits)
        return json.dumps(self.latest.facts | {"kernel": _distance(logits, found), "own": own})


class _Effect(torch.nn.Module):
    """A recipe's model, whose operator has the weights of the problem's constructor, like a kernel."""

    def __init__(self):
        super().__init__()
        seed, self._wide = torch.initial_seed(), []
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            self.model, self.places = _found(*self.parts.modules)
        calls = [call for place in self.places for call in place.calls]
        self.facts = {"places": len(self.places), "calls": len(calls), "shapes": sorted(set(map(_words, calls)))[:4]}
        self.parts.like = _split(*self.places[0].first)[0]
        for number, place in enumerate(self.places, 1):
            made = [_made(kind, place.problem, seed + number) for kind in (place.problem.Model, self.kind) if kind]
            _copy(made[0], place.holder)
            if self.kind:
                place.holder._modules["_kernel"] = place.kernel = made[1]
            if self.kind or self.parts.role == "twice":
                place.use(place.swapped)
        if self.parts.role == "operator":
            self.model = self.places[0].holder

    def setup(self):
        """Call the setup that a kernel declares, in each place."""
        for place in self.places:
            setup = getattr(type(place.kernel), "setup", None)
            if isinstance(setup, types.FunctionType):
                empty = _joined([torch.empty(shape, device="meta") for shape in place.calls[0]], place.ranks)
                place.kernel.setup(*empty[: setup.__code__.co_argcount - 1])

    def forward(self, *arguments, **keywords):
        """Return the logits, and for a drift a mark: 1, or 2 with a kernel."""
        inputs = keywords or arguments
        if self.parts.role == "operator":
            return _called(self.places[0].again, inputs)
        logits = _called(self.model, inputs)
        if self.parts.role != "drift":
            return logits
        self.parts.latest = self
        if self.kind is None:
            self.wide(inputs)  # The first call decides how much memory the process can use.
        return logits, torch.full((1,), 2 if self.kind else 1, device=logits.device)

    def wide(self, inputs):
        """Return the logits with the same weights in fp32."""
        self._wide = self._wide or [copy.deepcopy(self.model).float()]
        named = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
        wide = {n: one.float() if torch.is_tensor(one) and one.is_floating_point() else one for n, one in named}
        return _called(self._wide[0], wide if isinstance(inputs, dict) else wide.values())


class _Place:
    """A module, or a function that the model calls, with operators: a problem's module, its model, and shapes."""

    in_model = False

    def __init__(self, name, owner, attribute, operators):
        self.name, self.owner, self.attribute, self.old = name, owner, attribute, getattr(owner, attribute)
        self.holder = owner if isinstance(owner, torch.nn.Module) else torch.nn.Module()
        self.kernel, self.first, self.problem = None, None, operators[0][0]
        self.ranks = list(map(len, operators[0][2]))
        self.operators = [one for one in operators if list(map(len, one[2])) == self.ranks]
        #: Differences of the answers by the arguments that are no tensors, shapes of calls, of answers, and outside.
        self.far, self.calls, self.answers, self.outside = {}, [], {}, []
        self.use(self._noted)

    def use(self, how):
        """Make each call of the place by a method, or as before."""
        self._how = how
        # A function, unlike a method, gets the object if the owner is a class.
        call = lambda *arguments, **keywords: self._call(arguments, keywords)  # noqa: E731
        setattr(self.owner, self.attribute, call if how else self.old)

    def _call(self, arguments, keywords):
        if self._how is None or not _Place.in_model:
            return self.old(*arguments, **keywords)
        how, self._how = self._how, None  # Kernels and operators can call the function too.
        try:
            return how(arguments, keywords, *_split(arguments, keywords))
        finally:
            self._how = how

    def again(self, *tensors):
        """Return the answer of the first call with other tensors."""
        arguments, keywords = _filled(*self.first, tensors)
        return getattr(self.owner, self.attribute)(*arguments, **keywords)

    def _is_within(self, given):
        """Return whether all sizes are between the problem's smallest and largest ones."""
        sizes = zip(given, *(shapes for _, _, shapes in self.operators))
        return all(min(some) <= size <= max(some) for shapes in sizes for size, *some in zip(*shapes))

    def _noted(self, arguments, keywords, tensors, others):
        """Return the old answer. Note whether it is the operator's, and the shapes."""
        output = self.old(*arguments, **keywords)
        if others not in self.far:
            self.far[others] = self._distance(tensors, output)
        if self.far[others] <= _SAME:
            self.answers[_words(_shapes(tensors))] = _shapes(_listed(output))
            given = _shapes(_joined(tensors, self.ranks))
            is_within = self._is_within(given)
            (self.calls if is_within else self.outside).append(_shapes(tensors) if is_within else given)
            if is_within and self.first is None:
                self.first = _filled(arguments, keywords, [one.clone() for one in tensors])
                self.problem = next((one for one, _, shapes in self.operators if shapes == given), self.problem)
        return output

    def _distance(self, tensors, output):
        """Return the distance of the operator's answer from an output, relative to the largest value."""
        operator = self.operators[0][1]
        try:
            _copy(self.holder, operator)
            answers = _parted(operator(*_joined(tensors, self.ranks)), tensors, self.ranks)
            pairs = zip(_listed(answers), _listed(output), strict=True)
            return max(float((one - due).abs().max() / due.abs().max().clamp(min=1e-30)) for one, due in pairs)
        except Exception:  # noqa: BLE001 -- such a place is another operator
            return math.inf

    def swapped(self, arguments, keywords, tensors, others):
        """Return the kernel's answer, whose exceptions name the place, or else the second one of two old answers."""
        is_operator = self.far.get(others, math.inf) <= _SAME
        if not is_operator or not self._is_within(_shapes(joined := _joined(tensors, self.ranks))):
            return self.old(*arguments, **keywords)
        if self.kernel is None:
            self.old(*arguments, **keywords)
            return self.old(*arguments, **keywords)
        words = _words(_shapes(tensors))
        try:
            output = _parted(self.kernel(*joined), tensors, self.ranks)
            if (found := _shapes(_listed(output))) != (due := self.answers.get(words, found)):
                raise ValueError(f"the kernel returned {_words(found)} instead of {_words(due)}")
        except Exception as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (f"{error.args[0]} (in {self.name}, called with {words})", *error.args[1:])
            raise
        return output


def _found(recipe, problems, path):
    """Return a recipe's model and the operator's places, which answer as it does in fp32, or raise LookupError."""
    operators = [(one, _made(one.Model, one), _shapes(one.get_inputs())) for one in problems]
    owner, _, function = path.rpartition(".")
    try:
        places = [_Place(path, pkgutil.resolve_name(owner), function, operators)] if path else []
    except (AttributeError, ImportError, ValueError) as error:
        raise LookupError(f"the operator {path} is no function: {error}") from None
    model, inputs = _made(recipe.Model, recipe), recipe.get_inputs()
    for name, module in [] if path else list(model.named_modules()):
        if name and (fitting := [one for one in operators if _pairs(one[1], module) is not None]):
            places.append(_Place(f"{name} ({type(module).__name__})", module, "forward", fitting))
    if path:
        model._modules["_operator"] = places[0].holder
    with torch.no_grad():
        _called(model, inputs)
    found = []
    for place in places:
        place.use(None)
        if place.calls and not any(place.holder in other.holder.modules() for other in found):
            found.append(place)
    if found:
        return model, found
    for place in places:
        for call in place.outside:
            due = " or ".join(_words(shapes) for _, _, shapes in place.operators)
            call = f"{place.name} is called with {_words(call)}, and the problem has {due}"
            raise LookupError(f"the model calls the operator with shapes outside the problem's SHAPES: {call}")
    weights = _words(weight.shape for weight in operators[0][1].parameters()) or "none"
    why = f"{len(places)} modules have weights of its shapes ({weights}), and none answers as it does"
    if path:
        why = f"no call of {path} answers as it does" if places[0].far else f"it does not call {path}"
    near = [f"{one.name} differs by {far:.1g}" for one in places for far in one.far.values() if far < 1]
    closest = f". Relative to the largest value, {', '.join(near[:3])}" if near else ""
    raise LookupError(f"the problem's operator never occurs in the model: {why}{closest}")


def _imported(name, source):
    """Return a new module with a source, whose lines tracebacks show."""
    module, file = types.ModuleType(name), f"{name}.py"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), vars(module))  # noqa: S102 -- in a sealed process
    return module


def _made(kind, module, seed=None):
    """Return an object of a class with a module's arguments. As for a kernel alone, both have the same seed."""
    seed = torch.initial_seed() if seed is None else seed % 2**63
    torch.manual_seed(seed)
    given = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
    torch.manual_seed(seed)
    if isinstance(given, dict):
        return kind(**given)
    is_split = len(given) == 2 and isinstance(given[0], list) and isinstance(given[1], dict)
    return kind(*given[0], **given[1]) if is_split else kind(*given)


def _called(model, inputs):
    """Return the answer of a model. Places take no other calls, such as the judge's calls of a function."""
    _Place.in_model = True
    try:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    finally:
        _Place.in_model = False


def _shapes(given):
    """Return the shapes of the tensors among a call's arguments."""
    return [tuple(one.shape) for one in (given.values() if isinstance(given, dict) else given) if torch.is_tensor(one)]


def _split(arguments, keywords):
    """Return the tensors among a call's arguments, and all other arguments as text."""
    values = [*arguments, *keywords.values()]
    others = [... if torch.is_tensor(one) else one for one in values]
    return [one for one in values if torch.is_tensor(one)], f"{others} {list(keywords)}"


def _filled(arguments, keywords, tensors):
    """Return a call's arguments with other tensors."""
    left = iter(tensors)
    values = [next(left) if torch.is_tensor(one) else one for one in (*arguments, *keywords.values())]
    return values[: len(arguments)], dict(zip(keywords, values[len(arguments) :]))


def _listed(output):
    return [output] if torch.is_tensor(output) else list(output)


def _joined(tensors, ranks):
    """Return tensors whose first dimensions are joined, so that they have as many as the operator's inputs."""
    pairs = zip(tensors, ranks, strict=True)
    return [one.flatten(0, one.dim() - rank) if one.dim() > rank else one for one, rank in pairs]


def _parted(output, tensors, ranks):
    """Return an output with the dimensions that were joined."""
    if not torch.is_tensor(output):
        return tuple(_parted(one, tensors, ranks) for one in output)
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
