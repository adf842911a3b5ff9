"""Every bound of the public side, in one place; docs/api.md states them to users.

gRPC refuses by itself only messages above the receiver's limit, and its default of 4 MiB is an accident to us: a client
with default options must be able to read every event, so events stay below that and large ones are split.
"""

MAX_REQUEST_BYTES = 16 << 20  # one message of a client; gRPC itself answers RESOURCE_EXHAUSTED above it
MAX_EVENT_BYTES = 2 << 20  # one message to a client is closed when it grows past this; 4 MiB is what clients read
MAX_UNREAD_BYTES = 16 << 20  # output that a reader has not taken; then its request is cancelled
MAX_UNREAD_REFUSALS = 1000  # of one GenerateMany; then no further request of it is looked at
STALL_SECONDS = 60.0  # a message that its reader has not taken for so long ends the stream

MAX_CHOICES = 128
MAX_ALTERNATIVES = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024  # of one stop string
MAX_TOKEN_ID_LIST = 1 << 18  # stop, bad, allowed ids and logit bias; each is also bounded by the vocabulary
MAX_NAME_BYTES = 256  # request_id, tenant, cache_salt
MAX_CHAT_MESSAGES = 4096
MAX_LOGIT_BIAS = 2.0**100  # of either sign; penalties and the lowest temperature leave it finite
MAX_PENALTY = 1000.0  # of either sign; beyond it penalties only overflow
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
GREEDY_TEMPERATURE = 1e-5  # up to here a temperature means greedy

ENGINE_SILENCE_S = 5.0  # an engine process that says nothing for so long while asked is replaced

MESSAGES_PER_SECOND = 5000  # what one core may spend on messages; more streams than that get several tokens a message
MAX_COALESCING_SECONDS = 0.2

PUBLIC_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", 2 * MAX_EVENT_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    # Two servers on one port share its connections at random; a taken port shall be an error.
    ("grpc.so_reuseport", 0),
    # Clients ping every 30 s at most by our own client's setting; anything above one a 10 s is tolerated.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)
