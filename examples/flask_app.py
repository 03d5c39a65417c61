"""Limits in Flask. Run it with `python examples/flask_app.py`, then ask it: `curl -i localhost:8000/login -d password=x`."""

import os

from flask import Blueprint, Flask, abort, request

from headgate.http import by_header
from headgate.http.flask import decision, exempt, install, limit

app = Flask(__name__)
install(app, limit("100/minute", default=True))  # for views without a limit of their own

api = Blueprint("api", __name__, url_prefix="/api")
limit("1000/hour", key=by_header("X-API-Key"))(api)  # all views of the blueprint together


@app.get("/")
def home():
    return f"{decision().remaining} left\n"


@app.post("/login")
@limit("3/minute", count={401})  # only failed logins
def login():
    if request.form["password"] != "open sesame":
        abort(401)
    return "welcome\n"


@app.get("/health")
@exempt
def health():
    return "well\n"


@api.get("/reports")
@limit("20/day", cost=lambda request: int(request.args.get("pages", 1)))
def reports():
    return "reports\n"


app.register_blueprint(api)

if __name__ == "__main__":
    app.run(port=int(os.environ.get("PORT", "8000")))
