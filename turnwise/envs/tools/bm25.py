# pyright: reportUnknownMemberType=false
"""BM25 over texts that fit into memory, on bm25s. Ties are broken by the order of the texts, so
results repeat."""

import re
from collections.abc import Sequence
from typing import Any

MAX_QUERY_WORDS = 256
"""Further words of a query are ignored, which bounds the cost of a malicious query."""
MAX_QUERY_CHARS = 20_000
_WORD = re.compile(r"\w+")
_STOP_TEXT = """
a an and are as at be but by for if in into is it no not of on or such that the their then there
these they this to was will with
"""
_STOP_WORDS = frozenset(_STOP_TEXT.split())


class BM25Index:
    """An index over texts: English stems, Lucene's variant of BM25.

    `k1` and `b` default to what Anserini and Pyserini use.

    Example:
        >>> index = BM25Index(["red running shoes", "a blue shirt", "shoes for a red carpet"])
        >>> [number for number, score in index.search("Blue shirts", limit=2)]
        [1]
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 0.9, b: float = 0.4) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise ImportError(
                f"BM25 search needs bm25s and PyStemmer ({error}); run: pip install "
                "'turnwise[webshop]'"
            ) from error
        if not texts:
            raise ValueError("an index holds at least one text, got none")
        self._stem: Any = Stemmer.Stemmer("english")
        self.size = len(texts)
        tokens = [self._words(text) for text in texts]
        self._empty = not any(tokens)
        self._index: Any = bm25s.BM25(method="lucene", k1=k1, b=b)
        if not self._empty:
            self._index.index(tokens, show_progress=False)
            self._known: frozenset[str] = frozenset(self._index.vocab_dict)

    def search(self, query: str, *, limit: int = 10) -> list[tuple[int, float]]:
        """(number of the text, score) of the best matches, best first. Texts that share no word are
        left out."""
        import numpy as np

        if self._empty:
            return []
        words = [
            word
            for word in self._words(query[:MAX_QUERY_CHARS])[:MAX_QUERY_WORDS]
            if word in self._known
        ]
        if not words:
            return []
        scores = np.asarray(self._index.get_scores(words))
        best = np.argsort(-scores, kind="stable")[:limit]
        return [(int(number), float(scores[number])) for number in best if scores[number] > 0.0]

    def _words(self, text: str) -> list[str]:
        words = [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]
        return self._stem.stemWords(words)
