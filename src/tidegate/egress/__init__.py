"""The egress gateway: one address to which programs in any language send their calls, within the providers' quotas.

A thin layer over `tidegate.outbound`: its AsyncGate decides, waits, learns and settles. The gateway counts nothing.

settings     the egress file
explain      which limits apply to a request, and why
reload       reads the file again when it changes
callers      who may call: tokens, rights, own limits
routes       which provider and URL a request is for: /to/HOST/…, /NAME/…, http://… and CONNECT
addresses    which addresses may be connected to, checked after DNS resolution and at connect
messages     header fields that are passed on, added and removed; answers of the gateway itself
calls        one call: waits for its permit, sends it, retries what is safe
upstream     the connections to providers
deadlines    a deadline for each call, with one timer
relay        passes bodies on, chunk by chunk, and settles what they used
tunnels      CONNECT and upgraded connections
gateway      handles a request
server       the HTTP server
stats        counts by caller and provider, for metrics and the dashboard
access_log   one JSON line for each request
tracing      OpenTelemetry spans
"""

from tidegate._policy.setting_values import ListenAddress
from tidegate.egress._callers import EgressCaller
from tidegate.egress._settings import EgressSettings, Upstream, load_egress

__all__ = ["EgressCaller", "EgressSettings", "ListenAddress", "Upstream", "load_egress"]
