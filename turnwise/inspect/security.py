"""Who may ask the server: the holder of its token, or this machine's own pages and programs."""

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from turnwise.inspect.folder import InspectError
from turnwise.serve.http import is_loopback

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer."""


class Guard:
    """Checks the headers of a request, before its body is read.

    Args:
        token: needed for every request. None: any program on this machine may ask.
        port: names the cookie, because cookies are shared by all ports of a host.
    """

    def __init__(self, token: str | None, *, port: int) -> None:
        self.token = token
        self.cookie = f"turnwise_inspect_{port}"

    def check(
        self,
        headers: Mapping[str, str],
        *,
        writes: bool,
        page: bool,
        cookie: str | None,
        asked: str | None,
    ) -> None:
        """Refuses a request that is not the owner's.

        Args:
            writes: it changes something here, as playing does.
            page: it asks for the page itself, to which a link on another site may lead.
            cookie: the token of the request's cookie.
            asked: the token in its url.

        Raises:
            InspectError: says why.
        """
        host, origin = headers.get("host") or "", headers.get("origin")
        if self.token is None and not is_loopback(_host(host)):
            # A host name of another site that resolves to this machine (DNS rebinding).
            raise InspectError(
                f"without a token this server answers requests for this machine, not for "
                f"{host[:80]!r}; set TURNWISE_TOKEN",
                status=403,
            )
        site = headers.get("sec-fetch-site")
        foreign = origin is not None and origin.partition("://")[2] != host
        if foreign or (site not in (None, "same-origin", "none") and not page):
            raise InspectError("this server answers its own page only", status=403)
        if writes and not (headers.get("content-type") or "").startswith("application/json"):
            # What another site's form can send needs no permission of the browser.
            raise InspectError("a request that changes something is application/json", status=415)
        if self.token is not None:
            bearer = (headers.get("authorization") or "").removeprefix("Bearer ")
            if not any(self._is_token(given) for given in (cookie, asked, bearer)):
                raise InspectError(
                    "this server needs its token: open the url that it printed, which ends in "
                    "?token=...",
                    status=401,
                )

    def cookie_header(self) -> str:
        """Lets the browser keep the token, so that the page needs it in no further url."""
        return f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def _is_token(self, given: str | None) -> bool:
        return hmac.compare_digest((given or "").encode(), (self.token or "").encode())


def _host(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
