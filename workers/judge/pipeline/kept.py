"""Timed calls that are kept and verified when the candidate is gone.

The reference then draws their inputs again and answers them. A call is chosen after it is over, so nothing that the
candidate does before can depend on the choice. Each call is equally likely to be kept, and the candidate does not know
the number of calls: the expected share of wrong calls among the kept ones is the share among all. Of large outputs only
pieces at random positions are kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from kqueue.categories import Category
from kqueue.contract import Phase
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare
from workers.judge.pipeline.cases import GIVEN, Case
from workers.judge.pipeline.evidence import Compared
from workers.judge.pipeline.proxy import bytes_of
from workers.judge.pipeline.reference import Reference

#: Maximum size in bytes of outputs that are kept whole, and the size of larger ones' pieces, together and each. A call
#: with a tenth of its values wrong passes in 18 % of the draws, and all 8 kept calls in one of a million.
_WHOLE_BYTES: Final = 64 << 20
_KEPT_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 20
#: Maximum number of calls that are verified together, and maximum size in bytes of their outputs.
_MOST_TOGETHER: Final = 16
_TOGETHER_BYTES: Final = 256 << 20
#: Maximum number of calls that are kept with the reference's outputs, and maximum size in bytes of the outputs of both.
_MOST_PAIRS: Final = 128
_PAIRS_BYTES: Final = 256 << 20
#: Number of the calls verified together that are compared with float64 outputs in any case.
_SHARPENED: Final = 2


@dataclass(slots=True)
class Proof:
    """A call that is kept to be verified.

    Attributes:
        outputs: the candidate's outputs, or pieces of them.
        pieces: positions of the pieces, or None for whole outputs.
        case: the case, without its tensors unless it was answered: how its inputs are drawn, and the forward's seed.
        number: number of the call among those that could have been kept, or 0 for a variant, which is always kept.
        ns: time, or None if it does not count.
        beside: the outputs of the reference's timed call on the same inputs, or None.
    """

    outputs: list[torch.Tensor]
    pieces: list[list[slice]] | None
    case: Case
    number: int
    ns: int | None
    beside: list[torch.Tensor] | None


class KeptCalls:
    """The calls of one candidate that are kept.

    Attributes:
        counted: number of calls in all series that could have been kept. Being right in the last series only is not
            enough.
    """

    def __init__(self, reference: Reference, most: int, *, on_gpu: bool) -> None:
        """Keep all calls on variants, and at most ``most`` other calls that the reference must answer again."""
        self._reference = reference
        self._most = most
        nbytes = sum(map(bytes_of, reference.form.output_specs))
        #: Maximum number of calls that are kept with the outputs of the reference's timed calls.
        self._most_pairs = max(most, min(_MOST_PAIRS, _PAIRS_BYTES // max(2 * nbytes, 1)))
        self._on_gpu = on_gpu
        self._random = random.SystemRandom()
        self._proofs: list[Proof] = []
        self.counted = 0

    @property
    def keeps_all(self) -> bool:
        """True if all calls on the problem's own inputs are kept, with the reference's outputs for them."""
        return (
            self.counted > 0 and sum(proof.number > 0 and bool(proof.beside) for proof in self._proofs) == self.counted
        )

    @property
    def times(self) -> list[int]:
        """Times in nanoseconds of the kept calls that count."""
        return [proof.ns for proof in self._proofs if proof.ns is not None]

    def __len__(self) -> int:
        return len(self._proofs)

    def offer(
        self, case: Case, ns: int | None, outputs: list[torch.Tensor], beside: list[torch.Tensor] | None = None
    ) -> bool:
        """Keep a finished call with the same probability as any other call (reservoir sampling).

        Args:
            ns: the call's time, or None if it does not count.
            outputs: the judge's copies.
            beside: copies of the outputs of the reference's timed call on the same inputs, on a GPU, or None.

        Returns:
            Whether the memory of ``outputs`` and ``beside`` is kept, so that other calls need other memory.
        """
        number, index = 0, len(self._proofs)
        if case.kind == GIVEN:
            self.counted += 1
            number = self.counted
            own = [i for i, proof in enumerate(self._proofs) if proof.number]
            most = self._most if beside is None else self._most_pairs
            chosen = number - 1 if number <= most else self._random.randrange(number)
            if chosen >= most:
                return False
            index = own[chosen] if chosen < len(own) else index
        kept, pieces, is_held = outputs, None, False
        if (nbytes := sum(tensor.nbytes for tensor in outputs)) > _WHOLE_BYTES:
            pieces = [self._pieces(tensor, _KEPT_BYTES / nbytes) for tensor in outputs]
            kept = [_cut(tensor, where) for tensor, where in zip(outputs, pieces, strict=True)]
        elif self._on_gpu:
            is_held = True
        else:
            # On a CPU the calls of all series use the same memory, because other memory would be in other caches.
            kept = [tensor.clone() for tensor in outputs]
        drawn = case
        if not case.outputs:
            drawn = replace(case, slot=None, inputs=[], exact=None, unproven=None, again=None, moved=tuple)
        self._proofs[index : index + 1] = [Proof(kept, pieces, drawn, number, ns, beside if is_held else None)]
        return is_held

    def _pieces(self, tensor: torch.Tensor, share: float) -> list[slice]:
        """Choose random pieces of an output, which no process could predict while it was made."""
        size = min(_PIECE_BYTES // tensor.dtype.itemsize, tensor.numel())
        count = max(1, int(share * tensor.numel() / max(size, 1)))
        begins = (self._random.randrange(tensor.numel() - size + 1) for _ in range(count))
        return [slice(begin, begin + size) for begin in begins]

    def discount(self, after: int) -> None:
        """Clear the times of the kept calls after a number, which are still verified."""
        for proof in self._proofs:
            if proof.number > after:
                proof.ns = None

    def verify(self) -> list[Compared]:
        """Compare the kept calls with the reference's timed calls, or answer them with the reference.

        Float64 outputs can only excuse a kernel, so they are computed only where a call needs an excuse.

        Returns:
            The error figures of the calls that were compared. A variant whose answer the reference cannot give with
            certainty is not.

        Raises:
            EvaluationEnded: a call was wrong although all checked calls were right: ``nondeterministic``, or
                ``wrong_values`` on a variant.
        """
        kept, self._proofs = self._doubtful(), []
        reference = self._reference
        reference.oracle.reset_time()
        size = max(1, sum(tensor.nbytes for proof in kept[:1] for tensor in proof.outputs))
        together = max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // size)) if reference.cache.is_roomy else 1
        figures: list[Compared] = []
        for begin in range(0, len(kept), together):
            proofs = kept[begin : begin + together]
            given = [proof for proof in proofs if proof.case.kind == GIVEN]
            answered = reference.answer(*[proof.case for proof in given], exactly=False)
            variants = [proof for proof in proofs if proof.case.kind != GIVEN]
            answered += reference.answer(*[proof.case for proof in variants])
            figures += self._check([proof for proof in (*given, *variants) if proof.case in answered])
            reference.cache.drop([proof.case for proof in proofs])
        return figures

    def _doubtful(self) -> list[Proof]:
        """Return the calls that the reference must answer: mismatches with its timed calls, and a few other calls."""
        pairs = [proof for proof in self._proofs if proof.beside is not None]
        right: list[Proof] = []
        for begin in range(0, len(pairs), _MOST_TOGETHER):
            some = pairs[begin : begin + _MOST_TOGETHER]
            answers = [(proof.outputs, replace(proof.case, outputs=proof.beside or [])) for proof in some]
            matches = compare.need_no_excuse(answers, self._reference.settings)
            right += [proof for proof, is_right in zip(some, matches, strict=True) if is_right]
        # Float64 outputs show a lower precision in calls that are right, too.
        self._random.shuffle(right)
        settled = right[_SHARPENED:]
        return [proof for proof in self._proofs if all(proof is not each for each in settled)]

    def _check(self, proofs: Sequence[Proof]) -> list[Compared]:
        """Compare the kept outputs of calls with the reference's outputs, and return the figures of some calls."""
        settings = self._reference.settings
        right = compare.need_no_excuse([(proof.outputs, _of_pieces(proof)) for proof in proofs], settings)
        # A lower precision than the reference's shows only next to float64 outputs.
        chosen = [proof for number, proof in enumerate(proofs) if number < _SHARPENED or not right[number]]
        self._reference.sharpen([proof.case for proof in chosen if proof.case.kind == GIVEN])
        ends = compare.check_each([(proof.outputs, _of_pieces(proof)) for proof in chosen], settings)
        figures: list[Compared] = []
        for proof, ended in zip(chosen, ends, strict=True):
            if isinstance(ended, EvaluationEnded):
                self._reference.confirm(proof.case)
                raise _accusation(proof, ended)
            figures.append(ended)
        return figures


def _accusation(proof: Proof, ended: EvaluationEnded) -> EvaluationEnded:
    """Return the error for a wrong call, with indices into whole outputs."""
    facts = ended.outcome.facts.model_dump()
    if proof.pieces is not None:
        number = facts["output"]
        output, pieces = proof.case.outputs[number], proof.pieces[number]
        facts["map"] = None
        facts["first"] = [wrong | {"index": _index(wrong["index"], pieces, output)} for wrong in facts["first"]]
    is_given = proof.case.kind == GIVEN
    return EvaluationEnded(
        Category.NONDETERMINISTIC if is_given else ended.outcome.category,
        f"right when checked, wrong when timed: {ended.outcome.message}",
        Phase.TIME,
        **facts,
    )


def _of_pieces(proof: Proof) -> Case:
    """Return a call's case with the pieces of its outputs that correspond to the kept pieces."""
    case = proof.case
    if proof.pieces is None:
        return case
    pieces, again, moved = proof.pieces, case.again, case.moved

    def cut(tensors: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        return None if tensors is None else [_cut(t, where) for t, where in zip(tensors, pieces, strict=True)]

    def restore(outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Case]:
        return [_filled(*each) for each in zip(outputs, case.outputs, pieces, strict=True)], case

    parts = cut(case.outputs) or []
    answer = None if again is None else lambda: cut(again())
    return replace(
        case,
        slot=None,
        inputs=[],
        outputs=parts,
        exact=cut(case.exact),
        again=answer,
        moved=lambda: filter(None, map(cut, moved())),
        restore=restore,
    )


def _filled(values: torch.Tensor, tensor: torch.Tensor, pieces: list[slice]) -> torch.Tensor:
    """Return a copy of a tensor with the values of its pieces replaced."""
    whole = tensor.reshape(-1).clone()
    for piece, part in zip(pieces, values.split([len(whole[piece]) for piece in pieces]), strict=True):
        whole[piece] = part
    return whole.view(tensor.shape)


def _cut(tensor: torch.Tensor, pieces: list[slice]) -> torch.Tensor:
    """Return pieces of a tensor's values, concatenated."""
    flat = tensor.reshape(-1)
    return torch.cat([flat[piece] for piece in pieces])


def _index(index: tuple[int, ...], pieces: list[slice], output: torch.Tensor) -> tuple[int, ...]:
    """Return the index in an output of a value found in its pieces. Complex values have one more index."""
    position = index[0]
    for piece in pieces:
        size = len(range(output.numel())[piece])
        if position < size:
            return (*compare.unravel(range(output.numel())[piece][position], tuple(output.shape)), *index[1:])
        position -= size
    raise AssertionError("the value's index is beyond the pieces")
