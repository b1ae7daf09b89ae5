"""A site in Django REST Framework whose throttles are in the settings; TIDEGATE_STORE is the URL of their store."""

import os

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.urls import path

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    USE_TZ=True,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework"],
    REST_FRAMEWORK={
        "DEFAULT_AUTHENTICATION_CLASSES": [],
        "DEFAULT_THROTTLE_CLASSES": [
            "tidegate.inbound.drf.AnonRateThrottle",
            "tidegate.inbound.drf.ScopedRateThrottle",
        ],
        "DEFAULT_THROTTLE_RATES": {"anon": ["100/day", "1000/1w"], "uploads": "5/hour"},
    },
    TIDEGATE={"store": os.environ.get("TIDEGATE_STORE", "memory://"), "on_store_error": "deny"},
)
django.setup()

from rest_framework.response import Response  # noqa: E402 - needs the settings
from rest_framework.views import APIView  # noqa: E402 - needs the settings


class Upload(APIView):
    throttle_scope = "uploads"

    def get(self, request):
        return Response("thank you")


class Plain(APIView):
    def get(self, request):
        return Response("hello")


urlpatterns = [path("upload", Upload.as_view()), path("plain", Plain.as_view())]
app = get_wsgi_application()
