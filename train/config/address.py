"""Addresses of servers: which can be used, and how they are shown."""

import contextlib
import ipaddress
import re
from urllib.parse import urlsplit

_NAME = re.compile(r"(?=.{1,253}$)(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?)+")


def without_password(text: str) -> str:
    """Replaces the user name and the password of addresses in a text, and their queries, which may have a key.

    Example:
        >>> without_password("got 'http://user:secret@host:8000' and 'http://host/v1?api_key=secret'")
        "got 'http://***@host:8000' and 'http://host/v1?***'"
    """
    without_query = re.sub(r"(//[^'\"?#]*[?#])[^'\"]+", r"\1***", text)
    return re.sub(r"//[^'\"]*@", "//***@", without_query)


def url_problem(url: str) -> str:
    """Returns the reason why the address of a server cannot be used, or no text if it can.

    Example:
        >>> url_problem("https://[::1]:8000/prefix"), url_problem("http://a b")
        ('', 'it has a space, or a character that is not printable ASCII')
    """
    if not re.fullmatch("[!-~]+", url):
        return "it has a space, or a character that is not printable ASCII"
    if "@" in url:
        return "it has a user name or password, which logs would show; set rollout.source.api_key_env, or api_key_file"
    if set(url) & set("?#\\"):
        return "it has a query, a fragment or a backslash"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port
        if parts.netloc.startswith("["):
            ipaddress.IPv6Address(host)
    except ValueError as error:
        return f"it cannot be read: {error}"
    if parts.netloc.endswith(":") or port == 0:
        return "it has no port after the colon"
    return "" if parts.netloc.startswith("[") or _NAME.fullmatch(host) else f"{host!r} is no name of a host"


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone.

    Example:
      >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
      (True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
