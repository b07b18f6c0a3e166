"""Choose the next evaluations of a tuning run, and its winner, with Optuna and successive halving.

All configurations are first judged with few timed calls. If there are too many, Optuna samples them in rounds. The
best third of the correct ones is judged again with three times the calls, and so on. The finalists and the original
kernel are then judged in turn, several times, with all calls. The best of them fights a duel with the original.

Every choice depends only on the results so far, so a run can be resumed from them.
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
from kqueue.features.search.plan import ORIGINAL, Config, Entry, Result, promoted, ranked, rungs_of
from kqueue.features.tune.space import Space

#: Default number of configurations to judge.
TRIALS: Final = 64
#: Default number of configurations in the last comparison.
FINALISTS: Final = 3
#: Default number of evaluations of each finalist.
REPEATS: Final = 5
#: Maximum number of configurations of a run.
MOST_TRIALS: Final = 5000
#: Number of rungs with fewer calls than the last comparison.
_RUNGS: Final = 2
#: Configurations that Optuna samples in a round. The first round is random.
_ROUND: Final = 16
#: Random draws without a new configuration after which sampling ends.
_DRAWS: Final = 100_000
#: Fewest correct configurations for which importances are meaningful.
_ENOUGH: Final = 4


@dataclass(frozen=True, slots=True)
class Winner:
    """The winner of a tuning run.

    Attributes:
        config: the best configuration, or :data:`~kqueue.features.search.plan.ORIGINAL` for the original kernel.
        beats: True if it won the duel with the original. Without a duel, if each of its scores in the last comparison
            is better than each of the original's.
        compared: False if the original failed, or if no other configuration passed with a known score each time.
    """

    config: Config
    beats: bool
    compared: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """The furthest stage that a configuration reached.

    Attributes:
        calls: the most timed calls that it was judged with.
        final: True if it was in the last comparison.
        right: True if its kernel passed each time there.
        places: indices of its results among all results.
        middle: index of the result with the median score. Of two middle ones, the worse.
    """

    config: Config
    calls: int
    final: bool
    right: bool
    places: Sequence[int]
    middle: int


@dataclass(frozen=True, slots=True)
class Halving:
    """The plan of a tuning run.

    Attributes:
        calls: maximum number of timed calls in the last comparison.
        trials: maximum number of configurations.
        finalists: number of configurations in the last comparison, not counting the original.
        repeats: number of evaluations of each finalist.
    """

    space: Space
    calls: int
    trials: int
    finalists: int
    repeats: int

    def rungs(self) -> list[int]:
        """Return the numbers of timed calls, the fewest first."""
        return rungs_of(self.calls, _RUNGS)

    def next(self, results: Sequence[Result]) -> list[Entry] | None:
        """Return the next batch, or None if the run is complete.

        The run also ends when a result of the original is unknown, because nothing can then be compared with it.
        ``results`` are the complete results of all batches so far. Raise ConfigError if Optuna is not installed.
        """
        rungs = self.rungs()
        if not results:
            load_optuna()  # the importances need it in the end, even if nothing is sampled
            # The original kernel is one of the configurations, with the values in its source.
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
            # Optuna's pruners are not used: they decide on each trial when it is reported, against earlier trials only.
            # SuccessiveHalvingPruner promotes a grid whole whose scores ascend, with twice the timed calls.
            return [Entry(one, due[0]) for one in promoted(best, self.finalists)]
        # The finalists take turns, so that a busy minute slows all of them.
        last_ones = (ORIGINAL, *best[: self.finalists])
        return (
            [Entry(one, self.calls, turn) for turn in range(1, self.repeats + 1) for one in last_ones] if best else None
        )

    def challenger(self, results: Sequence[Result]) -> Config | None:
        """Return the configuration with the best median in the last comparison. None if it is the only one there."""
        scores = self._finals(results)
        original = scores.pop(ORIGINAL, None)
        return max(scores, key=lambda config: median_low(scores[config]), default=None) if original else None

    def _finals(self, results: Sequence[Result]) -> dict[Config, list[float]]:
        """Return the scores of the configurations that passed each time in the last comparison."""
        finals: dict[Config, list[Result]] = {}
        for one in results:
            if one.entry.repeat:
                finals.setdefault(one.entry.config, []).append(one)
        return {
            config: [one.score for one in mine if one.score is not None]
            for config, mine in finals.items()
            if len(mine) == self.repeats and all(one.right and one.score is not None for one in mine)
        }

    def winner(self, results: Sequence[Result], confirmed: bool | None = None) -> Winner | None:
        """Return the winner so far. Return None if no kernel passed, or if a result of the original is unknown.

        ``confirmed`` is True if the challenger won the duel with the original, or None without a duel.
        """
        if unknown(results):
            return None
        challenger, scores = self.challenger(results), self._finals(results)
        original = scores.pop(ORIGINAL, None)
        if original is None:
            right = all(one.right for one in results if one.entry.config == ORIGINAL)
            best = max(scores, key=lambda config: median_low(scores[config]), default=ORIGINAL if right else None)
            return None if best is None else Winner(best, beats=False, compared=False)
        if confirmed is not None and challenger is not None:
            return Winner(challenger if confirmed else ORIGINAL, beats=confirmed, compared=True)
        better = {config: mine for config, mine in scores.items() if min(mine) > max(original)}
        best = max(better, key=lambda config: median_low(better[config]), default=ORIGINAL)
        return Winner(best, beats=best != ORIGINAL, compared=bool(scores))

    def standings(self, results: Sequence[Result], winner: Winner | None) -> list[Standing]:
        """Return the configurations with their furthest stages: the winner first, then by stage and score."""
        by_config: dict[Config, list[int]] = {}
        for index, one in enumerate(results):
            by_config.setdefault(one.entry.config, []).append(index)

        def reached(index: int) -> tuple[bool, int]:
            return results[index].entry.repeat > 0, results[index].entry.calls

        standings: list[Standing] = []
        for config, all_places in by_config.items():
            final, calls = max(map(reached, all_places))
            indices = [index for index in all_places if reached(index) == (final, calls)]
            scored = [index for index in indices if results[index].score is not None] or indices
            middle = sorted(scored, key=lambda index: results[index].score or 0.0)[(len(scored) - 1) // 2]
            right = all(results[index].right for index in indices)
            standings.append(Standing(config, calls, final, right, indices, middle))

        def rank(one: Standing) -> tuple[bool, bool, bool, int, float]:
            won = winner is not None and one.config == winner.config
            return won, one.right, one.final, one.calls, results[one.middle].score or 0.0

        return sorted(standings, key=rank, reverse=True)

    def importances(self, results: Sequence[Result]) -> dict[str, float]:
        """Return how much each name decides which configurations are best. The sum is 1, and the largest comes first.

        The values are Optuna's PED-ANOVA over all correct configurations at the fewest calls. The result is empty if
        there are too few of them, or if all have the same score.
        """
        scored = [(one.entry.config, one.score) for one in self._tried(results) if one.right and one.score is not None]
        names = [name for name, values in zip(self.space.names, self.space.values, strict=True) if len(values) > 1]
        if len(scored) < _ENOUGH or len({score for _, score in scored}) < 2 or not names:
            return {}
        optuna = load_optuna()
        study = optuna.create_study(direction="maximize")
        for config, score in scored:
            study.add_trial(self._trial(optuna, config, score))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importances: dict[str, float] = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), params=names
            )
        return {name: float(value) for name, value in importances.items()}

    # Choosing ------------------------------------------------------------------------------------------------

    def _chosen(self, tried: Sequence[Result]) -> list[Config]:
        """Return the configurations to try next."""
        space = self.space
        seen = {result.entry.config for result in tried}
        done = len(seen - {ORIGINAL})
        if space.original is not None:
            seen.add(space.original)
        if space.size <= self.trials:
            return [] if tried else list(_distinct(itertools.product(*space.values), seen))
        count = min(_ROUND, self.trials - done)
        return list(itertools.islice(_distinct(self._sampled(tried, done), seen), max(0, count)))

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
            # Ask for more than needed, because the sampler can repeat known configurations.
            asked = [study.ask(self._distributions(optuna)).params for _ in range(2 * _ROUND)]
        for indices in asked:
            yield tuple(values[indices[name]] for name, values in zip(self.space.names, self.space.values, strict=True))
        chance = random.Random(done)  # noqa: S311 no secret
        for _ in range(_DRAWS):
            yield tuple(chance.choice(values) for values in self.space.values)

    def _tried(self, results: Sequence[Result]) -> Iterator[Result]:
        """Yield the results at the fewest calls of configurations in the space."""
        original, fewest = self.space.original, self.rungs()[0]
        for one in results:
            if one.entry.repeat or one.entry.calls != fewest:
                continue
            if one.entry.config != ORIGINAL:
                yield one
            elif original is not None:
                yield Result(Entry(original, fewest), one.right, one.score)

    def _distributions(self, optuna: Any) -> dict[str, Any]:
        """Return distributions of the indices of values. The order counts only if all values are numbers."""
        made = optuna.distributions
        return {
            name: made.IntDistribution(0, len(values) - 1)
            if all(_is_number(value) for value in values)
            else made.CategoricalDistribution(list(range(len(values))))
            for name, values in zip(self.space.names, self.space.values, strict=True)
        }

    def _trial(self, optuna: Any, config: Config, score: float) -> Any:
        choices = zip(self.space.names, self.space.values, config, strict=True)
        return optuna.trial.create_trial(
            params={name: values.index(value) for name, values, value in choices},
            distributions=self._distributions(optuna),
            value=score,
        )


def unknown(results: Iterable[Result]) -> bool:
    """Return True if a result of the original is unknown."""
    return any(one.score is None for one in results if one.entry.config == ORIGINAL)


def load_optuna() -> Any:
    """Return the module ``optuna`` with its logging limited to errors. Raise ConfigError if it is not installed."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(f"tuning needs Optuna ({error}): pip install 'kqueue[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distinct(configs: Iterator[Config], seen: set[Config]) -> Iterator[Config]:
    """Yield each new configuration once. Different configurations have different sources (:class:`Space`)."""
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
