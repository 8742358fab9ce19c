"""HTTP/2 by hand: what no library of clients does, such as to stop in the middle of a message."""

import contextlib
import socket
import struct

from gradwire.coordinator.protocol import SERVICE, method

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4


def frame(kind, flags, stream, body=b""):
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _literal(name, value):
    def text(each):
        assert len(each) < 127
        return bytes([len(each)]) + each.encode()

    return b"\x00" + text(name) + text(value)


class RawConnection:
    """A connection that sends no more than the server's windows allow, and no more than it is asked to."""

    def __init__(self, address, token=None, window=65_535, source="127.0.0.1"):
        """``window``: of every answer's; ``source``: the address it comes from."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10, source_address=(source, 0))
        settings = frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, window))
        self.socket.sendall(_PREFACE + settings + frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
        self._token, self._streams, self._buffer = token, 1, b""
        self._initial, self._windows = 65_535, {0: 65_535}

    def call(self, name, service=SERVICE, **metadata):
        """Begin a call; its number."""
        stream, self._streams = self._streams, self._streams + 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method(name, service),
            ":authority": "x",
            "te": "trailers",
        }
        headers |= {"content-type": "application/grpc"} | metadata
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        block = b"".join(_literal(*each) for each in headers.items())
        self.socket.sendall(frame(_HEADERS, _END_HEADERS, stream, block))
        self._windows[stream] = self._initial
        return stream

    def end(self, stream):
        """Send no more."""
        self.socket.sendall(frame(_DATA, _END_STREAM, stream))

    def send(self, stream, data, seconds=0.2):
        """Send what the windows let through while the server says something at least every so often; bytes sent."""
        sent = 0
        with contextlib.suppress(OSError):  # the server has ended it
            while sent < len(data):
                room = min(self._windows[0], self._windows.get(stream, 0), len(data) - sent, 16_384)
                if room <= 0:
                    if not self._take(seconds):
                        break
                    continue
                self.socket.sendall(frame(_DATA, 0, stream, data[sent : sent + room]))
                self._windows[0] -= room
                self._windows[stream] -= room
                sent += room
        return sent

    def _take(self, seconds):
        """What the server says within so many seconds; false if it says nothing."""
        self.socket.settimeout(seconds)
        try:
            got = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        if not got:
            raise ConnectionResetError
        self._buffer += got
        while len(self._buffer) >= 9 and len(self._buffer) >= 9 + (length := int.from_bytes(self._buffer[:3], "big")):
            kind, flags, stream = struct.unpack(">BBI", self._buffer[3:9])
            self._frame(kind, flags, stream, self._buffer[9 : 9 + length])
            self._buffer = self._buffer[9 + length :]
        return True

    def _frame(self, kind, flags, stream, body):
        if kind == _WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(body, "big")
        elif kind == _PING and not flags & _ACK:
            self.socket.sendall(frame(_PING, _ACK, 0, body))
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(body), 6):
                name, value = struct.unpack_from(">HI", body, at)
                if name == 4:  # the window that every stream begins with
                    self._windows = {
                        each: left + (value - self._initial if each else 0) for each, left in self._windows.items()
                    }
                    self._initial = value
            self.socket.sendall(frame(_SETTINGS, _ACK, 0))

    def ended(self, seconds):
        """Whether the server closes the connection within so many seconds of silence each."""
        with contextlib.suppress(OSError):
            while self._take(seconds):
                pass
            return False
        return True

    def close(self):
        self.socket.close()
