"""Bodies of answers are bounded in size and in time."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from turnwise.procs.answers import LongAnswerError, read_body


class Peer:
    """Says a head and then a byte every 10 ms, for as long as the test lasts."""

    def __init__(self, head: str) -> None:
        self._here, there = socket.socketpair()
        there.settimeout(60.0)
        self._over = threading.Event()
        self._here.sendall(head.encode())
        self._thread = threading.Thread(target=self._drip)
        self._thread.start()
        self.response = http.client.HTTPResponse(there)
        self.response.begin()
        there.close()

    def _drip(self) -> None:
        while not self._over.wait(0.01):
            self._here.sendall(b" ")

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._here.close()
        self.response.close()


@pytest.fixture
def endless() -> Iterator[Peer]:
    peer = Peer("HTTP/1.1 200 OK\r\n\r\n")
    yield peer
    peer.close()


def test_an_endless_body_ends_at_its_limit(endless: Peer) -> None:
    with pytest.raises(LongAnswerError, match="more than 5 bytes"):
        read_body(endless.response, limit=5, deadline=time.monotonic() + 3600.0)


def test_a_body_that_only_drips_ends_at_its_deadline(endless: Peer) -> None:
    with pytest.raises(TimeoutError):
        read_body(endless.response, limit=1 << 30, deadline=time.monotonic() + 0.1)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("Content-Length: 5\r\n\r\nhello", b"hello"),
        ("Content-Length: 0\r\n\r\n", b""),
        ("Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", b"hello!"),
        ("\r\nhello", b"hello"),
        ("Content-Length: 6\r\n\r\nhello", None),
        ("Transfer-Encoding: chunked\r\n\r\n5\r\nhel", None),
    ],
)
def test_whole_bodies_are_read_and_broken_ones_refused(head: str, told: bytes | None) -> None:
    here, there = socket.socketpair()
    here.sendall(b"HTTP/1.1 200 OK\r\n" + head.encode())
    here.close()
    response = http.client.HTTPResponse(there)
    response.begin()
    deadline = time.monotonic() + 3600.0
    if told is None:
        with pytest.raises(http.client.IncompleteRead):
            read_body(response, limit=10, deadline=deadline)
    else:
        assert read_body(response, limit=10, deadline=deadline) == told
    there.close()
