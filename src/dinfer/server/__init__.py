"""HTTP: the OpenAI protocol and what a canvas adds to it. `create_app` is in app.py."""
