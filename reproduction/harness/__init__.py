"""What experiments share.

`peers.py` starts peers, each on a core of its own (`pinned_swarm`); `users.py` has clients that write at once;
`local.py` chains spans in this process; `network_delay.py` makes a peer's links slow; `prompt_kinds.py`, `drafting.py`
and `scripted_draft.py` are for drafts; `gateway_process.py` runs a gateway; `machine.py` names the processor.
"""
