"""The walk of greedy decoding through answers that are known: the anchors it would stand at, and what each would yield.

Decoding begins at an answer's first token, which the prefill gives, drafts a block behind it, and goes on by what the
block yields: its right drafts in a row and the target's own token, never past the answer's end. A block that is right
for long leaps over the places behind it, mostly easy ones as well, so decoding stands at hard places more often than
anchors that are drawn evenly do, and a mean over the latter is biased upward: 1.721 where decoding yielded 1.311 a
pass, on the target's own answers. The walk over the same blocks took exactly the decoder's 4,303 passes (issue 15).

What a block yields does not depend on the walk, so blocks are computed many at once, where a walk stands and behind
it, and walked through on the host. That costs all anchors of an answer, but a pass at a time costs more: for the demo's
sizes (16 answers of 170 tokens, a CPU, bfloat16) 5.4 seconds against 1.6 where a pass yields 1.4 tokens, and 3.4
against 2.1 where it yields 3.6. Blocks are whole up to the answer's end, as where an answer ends by itself; a
decoder that is near its limit of new tokens drafts fewer slots, which may change its last pass.
"""

from dataclasses import dataclass, field

import numpy as np

_UNKNOWN = -1


@dataclass
class _Walk:
    """One answer's: its tokens stand at … `last` of a sample; decoding stands at `place`."""

    sample: int
    place: int
    last: int
    yields: list[int] = field(default_factory=list)


class AnswerWalks:
    """The walks through all answers of S samples, as far as their blocks are known.

    An answer is a stretch of supervised tokens, in a conversation each assistant's turn; one of a single token takes no
    pass. A sample's first token is never an answer's: nothing stands before it that a prefill could read. So of plain
    text it is the prompt.
    """

    def __init__(self, loss_mask_ST: np.ndarray) -> None:
        """`loss_mask_ST`: bool, False where padded."""
        edges_ST = np.diff(np.asarray(loss_mask_ST, np.int8), axis=1, prepend=0, append=0)
        begins, ends = np.argwhere(edges_ST == 1), np.argwhere(edges_ST == -1)
        answers = zip(begins.tolist(), ends[:, 1].tolist(), strict=True)
        self._streak_ST = np.full(loss_mask_ST.shape, _UNKNOWN, np.int32)
        self._walks = [_Walk(sample, max(1, begin), end - 1) for (sample, begin), end in answers]

    @property
    def yields(self) -> list[list[int]]:
        """Of each answer that takes a pass, the tokens that each of its passes yields."""
        return [walk.yields for walk in self._walks if walk.yields]

    def learn(self, anchors_SA: np.ndarray, streaks: np.ndarray) -> None:
        """Take in how many drafts are right in a row behind anchors, and go on.

        `anchors_SA` is padded with −1; `streaks` holds one value an anchor, sample after sample, none for padding.
        """
        sample, place = np.nonzero(anchors_SA >= 0)
        self._streak_ST[sample, anchors_SA[sample, place]] = streaks
        for walk in self._walks:
            while walk.place < walk.last and (streak := int(self._streak_ST[walk.sample, walk.place])) != _UNKNOWN:
                walk.yields.append(min(streak + 1, walk.last - walk.place))
                walk.place += walk.yields[-1]

    def next_anchors(self, count: int) -> list[np.ndarray] | None:
        """Each sample's next unknown anchors, from where its walks stand on, at most `count`; None when all have ended.

        The first is one that a walk stands at; those behind it may turn out to be leapt over.
        """
        wanted: list[list[np.ndarray]] = [[] for _ in self._streak_ST]
        for walk in self._walks:
            ahead = self._streak_ST[walk.sample, walk.place : walk.last]
            wanted[walk.sample].append(walk.place + np.flatnonzero(ahead == _UNKNOWN))
        anchors = [np.concatenate([np.empty(0, np.int64), *parts])[:count] for parts in wanted]
        return anchors if any(map(len, anchors)) else None
