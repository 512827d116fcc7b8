"""The admin API's description against the validator of the OpenAPI initiative's schema, from a running gateway."""

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request

from openapi_spec_validator import OpenAPIV31SpecValidator

CONFIG = """[server]
ingress = "127.0.0.1:0"
admin = "127.0.0.1:0"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:secret"]
"""

with tempfile.TemporaryDirectory() as directory:
    for name, text in [("oncehook.toml", CONFIG), ("secret", "whsec_conformance")]:
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(text)
    command = [os.environ["ONCEHOOK"], "serve", "--log-json"]
    gateway = subprocess.Popen(command, cwd=directory, stderr=subprocess.PIPE, text=True)
    try:
        admin = None
        for line in gateway.stderr:
            # Every line is JSON, the first one too.
            admin = json.loads(line)["fields"].get("admin")
            if admin:
                break
        if not admin:
            sys.exit("the gateway did not start")
        with urllib.request.urlopen(f"{admin}/api/openapi.json", timeout=10) as answer:
            document = json.load(answer)
    finally:
        gateway.terminate()
        gateway.wait(timeout=60)

if not re.match(r"3\.1\.", document["openapi"]):
    sys.exit(f"the document says OpenAPI {document['openapi']}")
problems = [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
            for error in OpenAPIV31SpecValidator(document).iter_errors()]
if problems:
    sys.exit("the OpenAPI document is not valid:\n" + "\n".join(problems))
print(f"conformance: the OpenAPI document is valid, {len(document['paths'])} paths")
