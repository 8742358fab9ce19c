"""Pages of a server's address for metrics."""

import urllib.error
import urllib.request


def page(address, name):
    """Its status and text."""
    try:
        with urllib.request.urlopen(f"http://{address}/{name}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
