"""What is judged next, and what has won: Optuna chooses, successive halving drops.

All configurations are judged with few timed calls; where there are too many, Optuna chooses which, a round at a time.
Of the right ones a third is judged again with three times the calls, and so on. The last few, and the kernel as it was
given, are judged side by side several times with all calls.

All of it follows from the results so far, so that whoever has these can go on.
"""

from __future__ import annotations

import importlib
import itertools
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Final

from kqueue.errors import ConfigError
from kqueue.tuning.space import ORIGINAL, Config, Space

#: What is done where nothing else is asked: configurations at most, those in the last comparison, evaluations of each.
TRIALS: Final = 64
FINALISTS: Final = 3
REPEATS: Final = 5
#: Configurations at most.
MOST_TRIALS: Final = 5000
#: From one rung to the next, so many times as many calls, and such a part of the configurations.
_RATIO: Final = 3
#: Rungs with fewer calls than all.
_RUNGS: Final = 2
#: The fewest timed calls that the contract allows.
_FEWEST_CALLS: Final = 5
#: Configurations that Optuna chooses at a time; as many are random before it knows anything.
_ROUND: Final = 16
#: Random configurations that are drawn before one that is new is given up.
_DRAWS: Final = 100_000
#: Right configurations from which on importances mean something.
_ENOUGH: Final = 4


@dataclass(frozen=True, slots=True)
class Entry:
    """One evaluation that is due.

    Attributes:
        config: of what.
        calls: its timed calls at most.
        repeat: 0 on the rungs; in the last comparison its number, from 1.
    """

    config: Config
    calls: int
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an entry.

    Attributes:
        entry: the entry.
        right: True if the kernel passed.
        score: more is better; None if nothing is known.
    """

    entry: Entry
    right: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class Winner:
    """What has won.

    Attributes:
        config: the best configuration, :data:`~kqueue.tuning.space.ORIGINAL` for the kernel as it was given.
        beats: True if each of its scores in the last comparison is better than each of the original's.
        compared: False if the original is not right, or no other is right and known each time there.
    """

    config: Config
    beats: bool
    compared: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a configuration came.

    Attributes:
        config: the configuration.
        calls: the most timed calls that it was judged with.
        final: True if it was in the last comparison.
        right: True if its kernel passed each time there.
        places: where its results are, among all.
        middle: where that with the middle score is; of two, the worse.
    """

    config: Config
    calls: int
    final: bool
    right: bool
    places: Sequence[int]
    middle: int


@dataclass(frozen=True, slots=True)
class Halving:
    """How a tuning run goes on.

    Attributes:
        space: the configurations.
        calls: timed calls at most in the last comparison.
        trials: configurations at most.
        finalists: configurations in the last comparison, beside the original.
        repeats: evaluations of each there.
    """

    space: Space
    calls: int
    trials: int
    finalists: int
    repeats: int

    def rungs(self) -> list[int]:
        """Return the numbers of timed calls, the fewest first."""
        known = {max(_FEWEST_CALLS, self.calls // _RATIO**rung) for rung in range(1, _RUNGS + 1)}
        return [*sorted(calls for calls in known if calls < self.calls), self.calls]

    def next(self, results: Sequence[Result]) -> list[Entry] | None:
        """Return the next batch; None if there is nothing to do any more.

        Without the original there is nothing to compare with: once it is unknown, nothing is left to do.

        Args:
            results: those of all batches so far, complete.

        Raises:
            ConfigError: Optuna is not installed.
        """
        rungs = self.rungs()
        if not results:
            # The kernel as it was given is one of the configurations, with whatever values it has.
            return [Entry(ORIGINAL, rungs[0]), *(Entry(one, rungs[0]) for one in self._chosen([]))]
        last = results[-1].entry
        if last.repeat or unknown(results):
            return None
        tried = [one for one in results if one.entry.calls == rungs[0]]
        if last.calls == rungs[0] and (more := self._chosen(tried)):
            return [Entry(one, rungs[0]) for one in more]
        best = ranked(one for one in results if one.entry.calls == last.calls)
        due = rungs[rungs.index(last.calls) + 1 :]
        if len(due) > 1 and len(best) > self.finalists:
            kept = best[: max(self.finalists, -(-len(best) // _RATIO))]
            return [Entry(one, due[0]) for one in kept]
        return self._last(best[: self.finalists])

    def _last(self, finalists: Sequence[Config]) -> list[Entry] | None:
        if not finalists:
            return None
        # One after the other in turn, so that a busy minute slows all of them.
        return [
            Entry(one, self.calls, repeat) for repeat in range(1, self.repeats + 1) for one in (ORIGINAL, *finalists)
        ]

    def winner(self, results: Sequence[Result]) -> Winner | None:
        """Return what has won by now; None if no kernel is right, or nothing is known of the original."""
        if unknown(results):
            return None
        finals: dict[Config, list[Result]] = {}
        for one in results:
            if one.entry.repeat:
                finals.setdefault(one.entry.config, []).append(one)
        scores = {
            config: [one.score for one in mine if one.score is not None]
            for config, mine in finals.items()
            if len(mine) == self.repeats and all(one.right and one.score is not None for one in mine)
        }
        own = scores.pop(ORIGINAL, None)
        if own is None:
            right = all(one.right for one in results if one.entry.config == ORIGINAL)
            best = max(scores, key=lambda config: median_low(scores[config]), default=ORIGINAL if right else None)
            return None if best is None else Winner(best, beats=False, compared=False)
        better = {config: mine for config, mine in scores.items() if min(mine) > max(own)}
        best = max(better, key=lambda config: median_low(better[config]), default=ORIGINAL)
        return Winner(best, beats=best != ORIGINAL, compared=bool(scores))

    def standings(self, results: Sequence[Result], winner: Winner | None) -> list[Standing]:
        """Return how far each configuration came: the winner first, then those that came furthest, the best first."""
        by_config: dict[Config, list[int]] = {}
        for place, one in enumerate(results):
            by_config.setdefault(one.entry.config, []).append(place)

        def reached(place: int) -> tuple[bool, int]:
            return results[place].entry.repeat > 0, results[place].entry.calls

        found: list[Standing] = []
        for config, all_places in by_config.items():
            final, calls = max(map(reached, all_places))
            places = [place for place in all_places if reached(place) == (final, calls)]
            known = [place for place in places if results[place].score is not None] or places
            middle = sorted(known, key=lambda place: results[place].score or 0.0)[(len(known) - 1) // 2]
            right = all(results[place].right for place in places)
            found.append(Standing(config, calls, final, right, places, middle))

        def rank(one: Standing) -> tuple[bool, bool, bool, int, float]:
            won = winner is not None and one.config == winner.config
            return won, one.right, one.final, one.calls, results[one.middle].score or 0.0

        return sorted(found, key=rank, reverse=True)

    def importances(self, results: Sequence[Result]) -> dict[str, float]:
        """Return for each name how much it decides which configurations are the best; together 1, the largest first.

        It is Optuna's PED-ANOVA, over all right configurations with the fewest calls. Empty where nothing can be said:
        too few of them, or all have the same score.
        """
        known = [(one.entry.config, one.score) for one in self._tried(results) if one.right and one.score is not None]
        names = [name for name, values in zip(self.space.names, self.space.values, strict=True) if len(values) > 1]
        if len(known) < _ENOUGH or len({score for _, score in known}) < 2 or not names:
            return {}
        optuna = load_optuna()
        study = optuna.create_study(direction="maximize")
        for config, score in known:
            study.add_trial(self._trial(optuna, config, score))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: dict[str, float] = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), params=names
            )
        return {name: float(value) for name, value in found.items()}

    # Choosing ------------------------------------------------------------------------------------------------

    def _chosen(self, tried: Sequence[Result]) -> list[Config]:
        """Return the configurations to try next."""
        space = self.space
        seen = {result.entry.config for result in tried}
        done = len(seen - {ORIGINAL})
        if space.original is not None:
            seen.add(space.original)
        if space.size <= self.trials:
            return [] if tried else list(_distinct(self._grid(), seen))
        count = min(_ROUND, self.trials - done)
        return list(itertools.islice(_distinct(self._sampled(tried, done), seen), max(0, count)))

    def _grid(self) -> Iterator[Config]:
        optuna = load_optuna()
        places = {
            name: list(range(len(values))) for name, values in zip(self.space.names, self.space.values, strict=True)
        }
        study = optuna.create_study(sampler=optuna.samplers.GridSampler(places, seed=0))
        for _ in range(self.space.size):
            yield self._config(study.ask(self._distributions(optuna)).params)

    def _sampled(self, tried: Sequence[Result], done: int) -> Iterator[Config]:
        optuna = load_optuna()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = optuna.samplers.TPESampler(
                seed=done, n_startup_trials=_ROUND, multivariate=True, constant_liar=True
            )
            study = optuna.create_study(direction="maximize", sampler=sampler)
            for one in self._tried(tried):
                if one.score is not None:
                    study.add_trial(self._trial(optuna, one.entry.config, one.score))
            # More than are needed, as it may choose again what is known.
            asked = [study.ask(self._distributions(optuna)).params for _ in range(2 * _ROUND)]
        yield from map(self._config, asked)
        chance = random.Random(done)  # noqa: S311 no secret
        for _ in range(_DRAWS):
            yield tuple(chance.choice(values) for values in self.space.values)

    def _tried(self, results: Sequence[Result]) -> Iterator[Result]:
        """Yield the results with the fewest calls of what is in the space; of the original if it is."""
        own, fewest = self.space.original, self.rungs()[0]
        for one in results:
            if one.entry.repeat or one.entry.calls != fewest:
                continue
            if one.entry.config != ORIGINAL:
                yield one
            elif own is not None:
                yield Result(Entry(own, fewest), one.right, one.score)

    def _distributions(self, optuna: Any) -> dict[str, Any]:
        """Places in the list of values: of numbers the order counts."""
        made = optuna.distributions
        return {
            name: made.IntDistribution(0, len(values) - 1)
            if all(_is_number(value) for value in values)
            else made.CategoricalDistribution(list(range(len(values))))
            for name, values in zip(self.space.names, self.space.values, strict=True)
        }

    def _trial(self, optuna: Any, config: Config, score: float) -> Any:
        places = zip(self.space.names, self.space.values, config, strict=True)
        return optuna.trial.create_trial(
            params={name: values.index(value) for name, values, value in places},
            distributions=self._distributions(optuna),
            value=score,
        )

    def _config(self, places: dict[str, int]) -> Config:
        return tuple(values[places[name]] for name, values in zip(self.space.names, self.space.values, strict=True))


def unknown(results: Iterable[Result]) -> bool:
    """Return True if nothing is known of an evaluation of the original."""
    return any(one.score is None for one in results if one.entry.config == ORIGINAL)


def ranked(results: Iterator[Result] | Sequence[Result]) -> list[Config]:
    """Return the right configurations, the best first, without the original."""
    right = [one for one in results if one.right and one.score is not None and one.entry.config != ORIGINAL]
    return [one.entry.config for one in sorted(right, key=lambda one: -(one.score or 0.0))]


def load_optuna() -> Any:
    """Return the module ``optuna``, which says nothing but errors from now on.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(f"tuning needs Optuna ({error}): pip install 'kqueue[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distinct(configs: Iterator[Config], seen: set[Config]) -> Iterator[Config]:
    """Yield the configurations that were not seen, each once: of two that differ, the sources do (:class:`Space`)."""
    for config in configs:
        if config not in seen:
            seen.add(config)
            yield config


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
