"""Views of Django REST Framework with throttles, and requests to them."""

from types import SimpleNamespace

from django.test import override_settings

from tests.inbound.sites import django_site  # noqa: F401 - configures Django

# These read the settings when they are imported.
from rest_framework.response import Response  # isort: skip
from rest_framework.test import APIRequestFactory, force_authenticate  # isort: skip
from rest_framework.views import APIView  # isort: skip

START = 1_728_000_000
FRAMEWORK = {"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []}
RATES = {"anon": "2/min", "user": "3/min", "x": "3/min", "y": "1/min", "none": None}


def settings_for(clock):
    """Return the settings of these tests, as a context manager."""
    framework = {**FRAMEWORK, "DEFAULT_THROTTLE_RATES": RATES}
    return override_settings(REST_FRAMEWORK=framework, TIDEGATE={"clock": clock})


def view_of(*classes, scope=None, base=APIView):
    class View(base):
        authentication_classes = ()
        permission_classes = ()
        throttle_classes = classes
        throttle_scope = scope

        def get(self, request):
            return Response("hello")

    return View.as_view()


def user(pk):
    return SimpleNamespace(pk=pk, is_authenticated=True)


def get(view, by=None, peer="203.0.113.9", **meta):
    request = APIRequestFactory().get("/", REMOTE_ADDR=peer, **meta)
    if by is not None:
        force_authenticate(request, by)
    response = view(request)
    return response.status_code, response.headers.get("Retry-After")


def statuses(view, count, *args, **options):
    return [get(view, *args, **options)[0] for _ in range(count)]
