"""Bodies of HTTP answers from servers that are not trusted."""

import http.client
import time

CHUNK = 1 << 16


class LongAnswerError(Exception):
    """An answer has more bytes than allowed."""


def read_body(response: http.client.HTTPResponse, *, limit: int, deadline: float) -> bytes:
    """The whole body. `http.client` alone limits neither its size nor its time: its timeout starts
    anew with every byte that arrives.

    Args:
        deadline: `time.monotonic()` by which the body must be complete.

    Raises:
        LongAnswerError: the body has more than `limit` bytes. Close the connection: the rest would
            be read as the next answer.
        TimeoutError: the body was not complete in time.
        http.client.IncompleteRead: the connection broke in the body.
    """
    data = bytearray()
    while chunk := response.read1(CHUNK):
        data += chunk
        if len(data) > limit:
            raise LongAnswerError(f"more than {limit} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
    if response.length:
        raise http.client.IncompleteRead(bytes(data), response.length)
    response.close()  # unlike read, read1 leaves that out, and the connection takes no next request
    return bytes(data)
