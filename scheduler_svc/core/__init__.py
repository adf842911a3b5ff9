"""The pure core: requests and results in, batches and events out. No I/O, no clock, no torch, no grpc.

To read it: scheduler (the API and who is live), sequence and rows (one choice, and the columns of those that run),
planning (what a step computes) with admission, outlook, lengths and ledger (who may start), batching (decisions to
columns), committing (what a result means) with stopping, residency (slots, blocks and steps in flight) over blocks and
prefix_cache, queue (who is next). invariants says what always holds; decision_log records and replays; golden stories
in tests/core/golden show it at work.
"""
