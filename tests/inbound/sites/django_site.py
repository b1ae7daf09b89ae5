"""A site in Django, for servers of both kinds."""

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

from tests.inbound.sites.config import CONFIG
from tidegate.inbound import asgi, wsgi

if not settings.configured:
    settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, USE_TZ=True)
    django.setup()

urlpatterns = [
    path("hello/<str:name>", lambda request, name: HttpResponse(f"hello {name}")),
    path("health", lambda request: HttpResponse("well")),
]
app = wsgi.RateLimitMiddleware(get_wsgi_application(), config=CONFIG)
async_app = asgi.RateLimitMiddleware(get_asgi_application(), config=CONFIG)
