"""`tidegate explain`: show which limits of a file apply to a request, the strictest first, and why."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate._cli.file_kinds import KINDS, recognise
from tidegate._cli.output import without_logs
from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import parse_address

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.explanation import Explanation
    from tidegate._cli.output import Output

EXAMPLES: Final = (
    ("tidegate explain config.yaml --request 'POST /login' --from 203.0.113.9", "a request that your API receives"),
    ("tidegate explain provider.yaml --request https://api.example.com/v1/items", "a request that you send"),
    ("tidegate explain service.yaml --policy api --key partner:acme", "a call to a service"),
    (
        "tidegate explain config.yaml --request /me --from ::1 --trusted-proxy ::1",
        "a request behind a proxy; add --header 'X-Forwarded-For: 203.0.113.9'",
    ),
)
METHOD = re.compile(r"[A-Za-z]+")
SENT_KINDS: Final = ("provider", "egress", "service")  # files that limit requests that are sent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the file and the request."""
    parser.description = (
        "Show which limits in a file apply to a request, the strictest first, and why: which rules match it and which "
        "do not, the key under which it is counted, and the response to a denied request. The command sends nothing "
        "and reads no usage: it shows the result for a new client."
    )
    parser.add_argument("file", metavar="FILE", help="a YAML file for a middleware, provider, service or gateway")
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help="kind of the file (default: detected)")
    request = parser.add_argument_group("the request")
    request.add_argument(
        "--request",
        metavar="REQUEST",
        help="a method and a path that you receive, such as 'POST /login', or a URL that you send (method: GET, or "
        "POST with --body)",
    )
    request.add_argument("--from", dest="peer", metavar="ADDRESS", help="the address that the request comes from")
    request.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="a header (may be repeated)"
    )
    request.add_argument(
        "--body", metavar="FILE", help="a file with the body of the request, for limits that count tokens"
    )
    request.add_argument("--plan", metavar="NAME", help="the plan of the client, if the file has limits for plans")
    request.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a proxy that the application trusts, as in its trusted_proxies (may be repeated)",
    )
    call = parser.add_argument_group("a call to a service")
    call.add_argument("--policy", metavar="NAME", help="the policy")
    call.add_argument("--key", action="append", metavar="KEY", help="the key; repeat it for the parts of one key")
    call.add_argument("--caller", metavar="NAME", help="the caller, for an egress gateway file")


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the explanation."""
    kind = args.kind or recognise(args.file)
    KINDS[kind].check(args.file)
    with without_logs():
        explanation = explain(args, kind)
    explanation.write(output)
    output.write_json(explanation.describe())
    return 0


def explain(args: argparse.Namespace, kind: str) -> Explanation:
    """Explain the request, or the call."""
    if kind == "service" and args.policy is not None:
        return explain_call(args)
    if kind not in ("inbound", *SENT_KINDS):
        raise ConfigError(f"{KINDS[kind].title} limits no requests; 'tidegate validate' describes it", file=args.file)
    if args.request is None:
        option = "--policy NAME --key KEY" if kind == "service" else "--request 'POST /login'"
        raise ConfigError(f"expected a request or call, such as: tidegate explain {args.file} {option}")
    method, target = read_request(args.request, "GET" if args.body is None else "POST")
    if kind == "inbound":
        return explain_path(args, method, target)
    if "://" not in target:
        advice = " (or --policy NAME --key KEY)" if kind == "service" else ""
        message = f"expected a URL such as 'GET https://api.example.com/v1'{advice}, not {args.request!r}"
        raise ConfigError(f"{message}: {KINDS[kind].title} limits requests that are sent", field="--request")
    return explain_url(args, kind, method, target)


def read_request(text: str, default: str) -> tuple[str, str]:
    """Read a method (or use the default one) and a path or URL."""
    method, _, target = text.strip().rpartition(" ")
    method = method.strip() or default
    if not METHOD.fullmatch(method) or not (target.startswith("/") or "://" in target):
        message = (
            f"expected a method and a path or a URL, such as 'POST /login' or 'GET https://host/path', not {text!r}"
        )
        raise ConfigError(message, field="--request")
    return method.upper(), target


def read_headers(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Read the headers."""
    found = []
    for text in args.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError(
                f"expected a header such as 'X-Forwarded-For: 203.0.113.9', not {text!r}", field="--header"
            )
        found.append((name.strip(), value.strip()))
    return found


def explain_path(args: argparse.Namespace, method: str, target: str) -> Explanation:
    """Explain a request that the application receives."""
    from tidegate._cli.explain_inbound import explain_received  # noqa: PLC0415 - not needed for --help

    if "://" in target:
        message = (
            f"expected a path such as 'POST /login', not {args.request!r}: this file limits requests that you receive"
        )
        raise ConfigError(message, field="--request")
    if args.peer is not None and parse_address(args.peer) is None:
        raise ConfigError(f"expected an address such as 203.0.113.9 or 2001:db8::1, not {args.peer!r}", field="--from")
    return explain_received(
        args.file,
        method,
        target,
        peer=args.peer,
        headers=read_headers(args),
        trusted=args.trusted_proxy,
        plan=args.plan,
    )


def explain_url(args: argparse.Namespace, kind: str, method: str, url: str) -> Explanation:
    """Explain a request that is sent to a provider."""
    from tidegate._cli.explain_outbound import explain_sent  # noqa: PLC0415 - not needed for --help

    files: tuple[Path | str, ...] = (args.file,)
    folders: tuple[Path | str, ...] = ()
    body = read_body(args.body)
    if kind == "provider":
        return explain_sent(method, url, headers=read_headers(args), body=body, files=files)
    if kind == "service":
        from tidegate.service._config.settings import load_settings  # noqa: PLC0415 - not needed for --help

        settings = load_settings(args.file, environment=os.environ)
        files, folders = settings.providers, settings.provider_dirs
    else:
        from tidegate.egress._settings import load_egress  # noqa: PLC0415 - not needed for --help

        gateway = load_egress(args.file)
        files, folders = gateway.providers, gateway.provider_dirs
    found = explain_sent(method, url, headers=read_headers(args), body=body, files=files, folders=folders)
    if kind == "egress":
        add_caller(args, found)
    return found


def add_caller(args: argparse.Namespace, found: Explanation) -> None:
    """Add the limits of the caller of an egress gateway."""
    from tidegate.egress._settings import load_egress  # noqa: PLC0415 - not needed for --help

    callers = {caller.name: caller for caller in load_egress(args.file).callers}
    if args.caller is None:
        if callers:
            found.notes.append(f"Callers have limits of their own: add them with --caller {' or '.join(callers)}.")
        return
    if args.caller not in callers:
        known = f"expected {', '.join(callers)}" if callers else "the file has no callers"
        advice = did_you_mean(args.caller, callers) or known
        raise ConfigError(f"there is no caller {args.caller!r}: {advice}", field="--caller")
    caller = callers[args.caller]
    if caller.limits:
        cost = {limit.unit: 1 for limit in caller.limits if limit.unit in ("requests", "concurrent-requests")}
        found.add_policy(f"caller {caller.name}", caller.policy, cost)
        found.sort()
        if len(cost) < len(caller.limits):
            found.notes.append(f"The limits of {caller.name} for tokens and money depend on the size of the request.")


def read_body(path: str | None) -> bytes | None:
    """Read the body of the request."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", field="--body") from None


def explain_call(args: argparse.Namespace) -> Explanation:
    """Explain a call of a service."""
    from tidegate._cli.explain_service import explain_policy  # noqa: PLC0415 - not needed for --help
    from tidegate.service._config.settings import load_settings  # noqa: PLC0415 - as above

    if not args.key:
        raise ConfigError("expected the key of the call, such as --key user:42", field="--key")
    key = args.key[0] if len(args.key) == 1 else tuple(args.key)
    return explain_policy(load_settings(args.file, environment=os.environ), args.policy, key)
