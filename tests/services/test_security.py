"""Who may call: bearer tokens, TLS, mutual TLS; health is open to everyone."""

import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from scheduler_svc import security
from scheduler_svc.security import BearerTokens, TlsFiles, read_tokens
from tests.services.served import Served, request, tokens


def certificate(folder, name, authority=None):
    """A key and a certificate for localhost, signed by `authority` (a name made before) or by itself."""
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", *subject]
    if authority is not None:
        command += ["-CA", folder / f"{authority}.crt", "-CAkey", folder / f"{authority}.key"]
        command += ["-addext", "basicConstraints=CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    for name, authority in (("ca", None), ("server", "ca"), ("client", "ca"), ("stranger", None)):
        certificate(folder, name, authority)
    return folder


def call(channel, metadata=()):
    with channel:
        return list(rpc.GenerationStub(channel).Generate(request(max_tokens=2), timeout=5, metadata=metadata))


def code(channel, metadata=()):
    with pytest.raises(grpc.RpcError) as error:
        call(channel, metadata)
    return error.value.code().name


@pytest.mark.parametrize(
    ("metadata", "admitted"),
    [
        ([("authorization", "Bearer first")], True),
        ([("authorization", "bearer second")], True),
        ([("authorization", "Bearer third")], False),
        ([("authorization", "Bearer ")], False),
        ([("authorization", "Basic first")], False),
        ([("authorization", "first")], False),
        ([], False),
    ],
)
def test_calls_need_one_of_the_tokens(tmp_path, metadata, admitted):
    with TokenServed(tmp_path) as served:
        channel = grpc.insecure_channel(served.address)
        if admitted:
            assert len(tokens(call(channel, metadata))) == 2
        else:
            assert code(channel, metadata) == "UNAUTHENTICATED"


class TokenServed(Served):
    def __init__(self, folder):
        super().__init__(folder, config=dict(tokens=("first", "second")))

    def stats(self):
        metadata = [("authorization", "Bearer first")]
        return self.stub.Stats(pb.StatsRequest(), timeout=5, metadata=metadata)


def test_every_method_but_health_is_guarded(tmp_path):
    with TokenServed(tmp_path) as served:
        for method, message in (
            ("GetModelInfo", pb.GetModelInfoRequest()),
            ("Stats", pb.StatsRequest()),
            ("Abort", pb.AbortRequest()),
        ):
            with pytest.raises(grpc.RpcError) as error:
                getattr(served.stub, method)(message, timeout=5)
            assert error.value.code().name == "UNAUTHENTICATED"
        with pytest.raises(grpc.RpcError) as error:
            list(served.stub.GenerateMany(iter([pb.ClientMessage(request=request(request_id="a"))]), timeout=5))
        assert error.value.code().name == "UNAUTHENTICATED"
        health = health_pb2_grpc.HealthStub(served.channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1


class TlsServed(Served):
    """Speaks to itself through a channel that the server trusts."""

    def __init__(self, folder, pki, mutual):
        files = TlsFiles(pki / "server.crt", pki / "server.key", pki / "ca.crt" if mutual else None)
        self._pki = pki
        super().__init__(folder, config=dict(tls=files))

    def stats(self):
        with secure(self._pki, self.address, "client") as channel:
            return rpc.GenerationStub(channel).Stats(pb.StatsRequest(), timeout=5)


def secure(pki, address, name=None, authority="ca"):
    pair = TlsFiles(pki / f"{name}.crt", pki / f"{name}.key") if name else TlsFiles()
    files = TlsFiles(pair.certificate, pair.key, pki / f"{authority}.crt")
    return grpc.secure_channel(address, files.channel_credentials())


def test_tls_hides_nothing_from_those_who_trust_the_authority(tmp_path, pki):
    with TlsServed(tmp_path, pki, mutual=False) as served:
        assert len(tokens(call(secure(pki, served.address)))) == 2
        assert code(grpc.insecure_channel(served.address)) == "UNAVAILABLE"
        assert code(secure(pki, served.address, authority="stranger")) == "UNAVAILABLE"


def test_mutual_tls_refuses_strangers(tmp_path, pki):
    with TlsServed(tmp_path, pki, mutual=True) as served:
        assert len(tokens(call(secure(pki, served.address, "client")))) == 2
        assert code(secure(pki, served.address)) == "UNAVAILABLE"
        assert code(secure(pki, served.address, "stranger")) == "UNAVAILABLE"


def test_token_files_skip_comments_and_must_hold_one(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# ours\nfirst\n\n second \n")
    assert read_tokens(path) == ("first", "second")
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no token"):
        read_tokens(path)


def test_an_open_door_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(BearerTokens, "_admits", lambda self, metadata: True)
    with pytest.raises(pytest.fail.Exception):
        test_calls_need_one_of_the_tokens(tmp_path / "a", [], False)
    monkeypatch.setattr(security, "OPEN_METHODS", ("/",))
    monkeypatch.setattr(BearerTokens, "_admits", lambda self, metadata: False)
    with pytest.raises(pytest.fail.Exception):
        test_every_method_but_health_is_guarded(tmp_path / "b")
