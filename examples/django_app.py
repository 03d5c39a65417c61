"""Limits in Django and Django REST framework, in one file. Run it with `python examples/django_app.py`, then ask it:
`curl -i localhost:8000/login -d password=x`.
"""

import os
from wsgiref.simple_server import make_server

import django
from django.conf import settings

from headgate.http.django import by_session, decision, exempt, limit

settings.configure(
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="only for this example",
    SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware", "headgate.http.django.rate_limits"],
    HEADGATE_LIMITS=[limit("100/minute", default=True)],  # for views without a limit of their own
    REST_FRAMEWORK={"UNAUTHENTICATED_USER": None, "DEFAULT_AUTHENTICATION_CLASSES": []},
)
django.setup()

from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402

from headgate.http.rest_framework import throttle  # noqa: E402


def home(request):
    return HttpResponse(f"{decision(request).remaining} left\n")


@limit("3/minute", count={401})  # only failed logins
def login(request):
    if request.POST["password"] != "open sesame":
        return HttpResponse(status=401)
    return HttpResponse("welcome\n")


@limit("5/minute", key=by_session)
async def search(request):
    return HttpResponse("found\n")


@exempt
def health(request):
    return HttpResponse("well\n")


class Reports(APIView):
    throttle_classes = (throttle("20/day", cost=lambda request: int(request.query_params.get("pages", 1))),)

    def get(self, request):
        return Response({"reports": []})


urlpatterns = [
    path("", home),
    path("login", login),
    path("search", search),
    path("health", health),
    path("reports", Reports.as_view()),
]

if __name__ == "__main__":
    with make_server("127.0.0.1", int(os.environ.get("PORT", "8000")), get_wsgi_application()) as server:
        print(f"listens on http://127.0.0.1:{server.server_port}")
        server.serve_forever()
