"""Prefix sharing: slots read a common prompt prefix from one slot, so that it is stored once."""

from turnwise.generate.blocks.engine import Copy, Link
from turnwise.generate.scheduler import SessionState


class Sharing:
    """Tracks which slots read a prefix from another slot, and what must be copied before that slot
    is overwritten.

    Example: slots 1 and 2 read 64 positions of slot 0, which is then wanted for something else

        >>> sharing = Sharing()
        >>> states = [SessionState(key=name, seed=0, slot=slot, cached=70)
        ...           for slot, name in enumerate("abc")]
        >>> for state in states[1:]:
        ...     sharing.follow(state, 0, num=64)
        >>> [(link.slot, link.holder, link.num) for link in sharing.take_links()]
        [(1, 0, 64), (2, 0, 64)]
        >>> sharing.vacate(0)
        >>> [(move.source, move.target, move.last) for move in sharing.take_moves()]
        [(0, 1, 64)]
        >>> [(link.slot, link.holder, link.num) for link in sharing.take_links()]
        [(1, 1, 0), (2, 1, 64), (0, 0, 0)]
    """

    def __init__(self) -> None:
        self._holder: dict[int, int] = {}
        # Holder -> (session, its slot, positions).
        self._followers: dict[int, list[tuple[SessionState, int, int]]] = {}
        self._moves: list[Copy] = []
        self._links: list[Link] = []

    def follow(self, state: SessionState, holder: int, *, num: int) -> None:
        """The session reads its first `num` positions in the holder's slot."""
        if num:
            assert state.slot is not None
            self._holder[state.slot] = holder
            self._followers.setdefault(holder, []).append((state, state.slot, num))
            self._links.append(Link(slot=state.slot, holder=holder, num=num))

    def vacate(self, slot: int) -> None:
        """Call before a slot is overwritten from its start: moves its readers to another holder and
        ends its own sharing."""
        holder = self._holder.pop(slot, None)
        if holder is not None:
            self._followers[holder] = [
                entry for entry in self._followers.get(holder, []) if entry[1] != slot
            ]
        # Sessions that were released or evicted have no readers.
        entries = [
            (state, at, num)
            for state, at, num in self._followers.pop(slot, [])
            if state.slot == at and state.cached >= num
        ]
        if entries:
            (_, heir, num), *others = entries
            self._moves.append(Copy(source=slot, target=heir, last=num))
            self._links.append(Link(slot=heir, holder=heir, num=0))
            del self._holder[heir]
            for _, at, num in others:
                self._holder[at] = heir
                self._links.append(Link(slot=at, holder=heir, num=num))
            self._followers[heir] = others
        self._links.append(Link(slot=slot, holder=slot, num=0))

    def take_moves(self) -> list[Copy]:
        moves, self._moves = self._moves, []
        return moves

    def take_links(self) -> list[Link]:
        links, self._links = self._links, []
        return links
