"""moto's S3 server on loopback, the files of a folder in its bucket `caches`: `python s3_server.py PORT FOLDER`.

The files are put in before the port is open, so a client sees no server or all of them.
"""

import sys
from pathlib import Path

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.test import Client

port, folder = int(sys.argv[1]), Path(sys.argv[2])
application = DomainDispatcherApplication(create_backend_app)
client = Client(application)
assert client.put("/caches").status_code == 200
for path in folder.rglob("*"):
    if path.is_file():
        assert client.put(f"/caches/{path.relative_to(folder)}", data=path.read_bytes()).status_code == 200
run_simple("127.0.0.1", port, application, threaded=True)
