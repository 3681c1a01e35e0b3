"""The OpenAI-compatible HTTP server; needs the `server` extra.

`app.create_app` is the application, `run.serve` runs it.
"""
