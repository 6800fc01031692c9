"""Sequences of events that find planted faults, by model: made by ``record.py``."""

from __future__ import annotations

from tests.core.lifecycle.model import Sequence, call
from tests.core.lifecycle.two_engines import Leaves

SEQUENCES: dict[str, dict[str, Sequence]] = {
    "protocol": {
        "done bound to the data read": Sequence(
            "a hold that was still to be read was ended by those of its own engine:",
            [
                call("start"),
                call("starve", picks=bytes.fromhex("0000")),
            ],
        ),
        "the slot word is ready at take-on": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call("hand", back=0, picks=bytes.fromhex("01")),
                call("hand", items=1, rounds=4),
            ],
        ),
        "only one check when a drafter runs": Sequence(
            "an active hold was read as stale",
            [
                call("start", slots=2),
                call("hand", picks=bytes.fromhex("01")),
                call("hand", items=2, rounds=4),
            ],
        ),
        "no check when a drafter runs": Sequence(
            "an active hold was read as stale",
            [
                call("start", slots=2),
                call("hand", picks=bytes.fromhex("01")),
                call("hand", items=2, rounds=4),
            ],
        ),
        "counter generations across a restart": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call(
                    "drift", picks=bytes.fromhex("000000000000000000000000000000000000010101b0b6")
                ),
                call("disturb", picks=bytes.fromhex("00")),
            ],
        ),
        "the slot word is cleared after the pages are given back": Sequence(
            "pages given back while their slot word is valid",
            [
                call("start", slots=2),
                call("starve"),
            ],
        ),
        "abandon not sent": Sequence(
            "told were",
            [
                call("start"),
                call("hand", aborts=True, rounds=1),
            ],
        ),
        "an unread rank gets no done": Sequence(
            "told were",
            [
                call("start", ranks=2, second=1),
                call("drift", picks=bytes.fromhex("000000000000000000000000000000000000")),
            ],
        ),
        "one rank counted twice": Sequence(
            "verdict",
            [
                call("start", second=1, is_older=True),
                call("hand", engines="BBB"),
            ],
        ),
        "any generation releases": Sequence(
            "pages given back that a consumer may still read",
            [
                call("start", slots=2, max_held=2),
                call(
                    "drift", picks=bytes.fromhex("000000000000000000000000000000000000000000000000")
                ),
            ],
        ),
        "any incarnation releases": Sequence(
            "pages given back that a consumer may still read",
            [
                call("start"),
                call("disturb", picks=bytes.fromhex("00000000")),
                call("disturb", what="stray"),
            ],
        ),
        "consumer engines counted together": Sequence(
            "pages given back that a consumer may still read",
            [
                call("start", ranks=3),
                call("drift", picks=bytes.fromhex("0100")),
                call(
                    "drift",
                    picks=bytes.fromhex(
                        "0000000000000000000000000000000000000000000000000200350700004a051ada0f00b106"
                    ),
                ),
            ],
        ),
        "expired and sent": Sequence(
            "the worker still holds",
            [
                call("start"),
                call("drift", picks=bytes.fromhex("00")),
            ],
        ),
        "ready before the device has finished": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call("hand", items=1, kind="drafter", ordered=True, rounds=4),
            ],
        ),
        "drops after take-ons": Sequence(
            "slot words",
            [
                call("start"),
                call("ask", errs=True),
            ],
        ),
        "reset forgotten": Sequence(
            "over on every rank, but its pages never came back:",
            [
                call("start", slots=2, max_held=2),
                call("drift", picks=bytes.fromhex("00000000000000000000")),
            ],
        ),
        "the slot is free at the ticket": Sequence(
            "an active hold was read as stale",
            [
                call("start"),
                call("drift", picks=bytes.fromhex("0000000000000000000000")),
            ],
        ),
        "the old hold forgotten at a preemption": Sequence(
            "the worker still holds",
            [
                call("start"),
                call("ask", until="preempted"),
            ],
        ),
        "held without limit": Sequence(
            "more pages held than allowed:",
            [
                call("start", slots=2, max_held=2),
                call("drift", picks=bytes.fromhex("00000000000000000000")),
            ],
        ),
        "pages given back when one rank has sent": Sequence(
            "reported sent, but the scheduler has no such held request:",
            [
                call("start", ranks=2),
                call("drift", picks=bytes.fromhex("00")),
            ],
        ),
        "the fence ignored": Sequence(
            "stale, but reported",
            [
                call("start"),
                call("rest", picks=bytes.fromhex("010000000000000000000000000000000002032703")),
            ],
        ),
        "reported while failing": Sequence(
            "LoadAction.ABANDON while bytes may land",
            [
                call("start"),
                call(
                    "harm", picks=bytes.fromhex("00000000000000000000000000000000000001010102b600")
                ),
                call("harm", failing=True, picks=bytes.fromhex("000000000006")),
            ],
        ),
        "an abort does not wait": Sequence(
            "LoadAction.ABANDON while bytes may land",
            [
                call("start"),
                call(
                    "give_up", picks=bytes.fromhex("0000000000000000000000000000000000000101000202")
                ),
                call("give_up", picks=bytes.fromhex("010101010102"), who="abort A"),
            ],
        ),
        "read after the report": Sequence(
            "a read after the report",
            [
                call("start"),
                call("hand", aborts=True, rounds=1),
            ],
        ),
        "one fence for all ranks": Sequence(
            "stale, but reported",
            [
                call("start", ranks=2),
                call(
                    "give_up",
                    picks=bytes.fromhex(
                        "010000000000000000000000000000000002270000000100626a0001013e01008900000000a10003030000010004"
                    ),
                ),
            ],
        ),
        "computing pages are checked once": Sequence(
            "no rest",
            [
                call("start"),
                call("drift", picks=bytes.fromhex("010000000000000000000000000001010101010701")),
            ],
        ),
        "the deadline ignored": Sequence(
            "failed and without transfers, but not reported",
            [
                call("start"),
                call(
                    "rest",
                    picks=bytes.fromhex(
                        "0000000000000000000000000000000000000000000000000000010102"
                    ),
                ),
                call("rest", picks=bytes.fromhex("0006"), seconds=25.0),
            ],
        ),
        "abandoned before its reads have ended": Sequence(
            "LoadAction.ABANDON while bytes may land",
            [
                call("start"),
                call("give_up", picks=bytes.fromhex("0000000000000000000000000000000000000101")),
                call("give_up", who="abort A"),
            ],
        ),
        "renewals not sent": Sequence(
            "given up, though a consumer waits for it:",
            [
                call("start", slots=2),
                call(
                    "starve",
                    picks=bytes.fromhex("00000000000000000000000000000000000101010101c2ca"),
                ),
                call("starve"),
            ],
        ),
        "renewed once": Sequence(
            "expired, although it was renewed:",
            [
                call("start"),
                call(
                    "give_up", picks=bytes.fromhex("00000000000000000000000000000000000000030405")
                ),
                call("rest", patient=True),
            ],
        ),
        "renewed while the fence is under way": Sequence(
            "a hold that was still to be read was ended by those of its own engine:",
            [
                call("start", ranks=2, first=2, slots=2),
                call(
                    "starve", picks=bytes.fromhex("0000010202000000000000000000000001010406010144")
                ),
                call("rest", seconds=9.5),
            ],
        ),
        "a renewal before the proof was verified": Sequence(
            "a message about a forged ticket:",
            [
                call("start", slots=2),
                call("disturb", picks=bytes.fromhex("0000000000000000000000")),
                call("hand", engines="AA", forged=True),
            ],
        ),
        "a load before the proof was verified": Sequence(
            "a message about a forged ticket:",
            [
                call("start"),
                call("hand", forged=True),
            ],
        ),
        "renewals ignored": Sequence(
            "given up, though its consumer lives:",
            [
                call("start", slots=2),
                call(
                    "starve",
                    picks=bytes.fromhex("00000000000000000000000000000000000101010101c2ca"),
                ),
                call("starve"),
            ],
        ),
        "the oldest of all ranks counts": Sequence(
            "given up, though its consumer lives:",
            [
                call("start", ranks=3, slots=2),
                call("starve", picks=bytes.fromhex("00000001023e")),
                call("starve"),
            ],
        ),
        "ranks are never asked for silent holds": Sequence(
            "kept, though it is silent and pages are lacking:",
            [
                call("start", slots=2),
                call("starve"),
            ],
        ),
        "an ended hold's slot word is cleared after its pages are given back": Sequence(
            "pages given back while their slot word is valid",
            [
                call("start", slots=2),
                call("starve"),
            ],
        ),
        "a load without reads is not reported": Sequence(
            "loads that are never over:",
            [
                call("start"),
                call("hand", aborts=True),
            ],
        ),
        "done bound to the fence of a shared load": Sequence(
            "a hold that was still to be read was ended by those of its own engine:",
            [
                call("start"),
                call("hand", engines="BBB"),
            ],
        ),
        "abandon sent for a shared load": Sequence(
            "told were",
            [
                call("start"),
                call(
                    "hand",
                    items=1,
                    kind="drafter",
                    picks=bytes.fromhex("0000"),
                    rounds=1,
                    sample=True,
                ),
            ],
        ),
        "done ordered when the first user is over": Sequence(
            "a hold that was still to be read was ended by those of its own engine:",
            [
                call("start"),
                call("hand", engines="BBB"),
            ],
        ),
        "done never ordered": Sequence(
            "no done was sent for a shared hold:",
            [
                call("start"),
                call("hand", sample=True),
            ],
        ),
        "every load sends done": Sequence(
            "a hold that was still to be read was ended by those of its own engine:",
            [
                call("start"),
                call("hand", engines="BBB"),
            ],
        ),
        "a sample counts as the only user": Sequence(
            "a hold that was still to be read was ended by those of its own engine:",
            [
                call("start"),
                call("ask"),
                call("hand", cached=1, picks=bytes.fromhex("003e00"), sample=True),
            ],
        ),
        "an answer's ticket says computed": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call("hand", items=2, kind="conversation", rounds=2),
            ],
        ),
        "a reclaimed hold's pages given back at once": Sequence(
            "pages given back while their slot word is valid",
            [
                call("start"),
                call("hand", kind="conversation", picks=bytes.fromhex("00")),
                call("ask"),
            ],
        ),
        "a reclaimed hold's pages given back when one rank has sent": Sequence(
            "reported sent, but the scheduler has no such held request:",
            [
                call("start", ranks=2, slots=2),
                call("ask", kind="conversation"),
                call("hand", picks=bytes.fromhex("00")),
            ],
        ),
        "a reclaimed hold's slot word is cleared after its pages are given back": Sequence(
            "pages given back while their slot word is valid",
            [
                call("start", slots=2),
                call("hand", kind="conversation"),
                call("hand", picks=bytes.fromhex("00")),
            ],
        ),
        "answers are never reclaimed": Sequence(
            "kept for a next turn, though requests wait for pages:",
            [
                call("start", slots=2),
                call("ask", kind="conversation"),
                call("starve"),
            ],
        ),
        "prompts are reclaimed": Sequence(
            "ended by the scheduler, without a reason:",
            [
                call("start", slots=2),
                call(
                    "drift", picks=bytes.fromhex("000000000000000000000000000000000000000000000000")
                ),
            ],
        ),
        "the scheduler half counts the TTL": Sequence(
            "ended by the scheduler, without a reason:",
            [
                call("start"),
                call("ask", kind="conversation"),
            ],
        ),
        "the consumer counts the TTL": Sequence(
            "refused a good ticket:",
            [
                call("start"),
                call("ask", kind="conversation", until="ticket"),
                call("rest", picks=bytes.fromhex("0000"), seconds=25.0),
            ],
        ),
        "no TTL": Sequence(
            "pages given back that a consumer may still read",
            [
                call("start"),
                call("ask", kind="conversation"),
            ],
        ),
    },
    "early tickets": {
        "the generation kept at a preemption": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call("ask", picks=bytes.fromhex("0000"), size=2),
                call("stop_prefill"),
            ],
        ),
        "the last chunk published early": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call(
                    "ask",
                    drafter=True,
                    picks=bytes.fromhex("00020080030082e80003010000e8010100a0b8"),
                ),
            ],
        ),
        "a watermark before its event": Sequence(
            "stale bytes accepted:",
            [
                call("start", plan=1),
                call("ask", drafter=True, picks=bytes.fromhex("000002"), size=2),
                call("ask", picks=bytes.fromhex("0004b20202022a68")),
                call("ask", picks=bytes.fromhex("051a4d03")),
                call("ask", picks=bytes.fromhex("8400bf")),
                call("ask", picks=bytes.fromhex("0098208406000f")),
            ],
        ),
        "a part of one prompt taken for another": Sequence(
            "another prompt's pages accepted",
            [
                call("start"),
                call("ask", fits=False),
            ],
        ),
        "a hold reported sent while computing": Sequence(
            "reported sent, but the scheduler has no such held request:",
            [
                call("start"),
                call("ask", picks=bytes.fromhex("000001b6"), size=2),
                call("abort_decode"),
                call("proceed", script=["P"]),
            ],
        ),
        "watermarks ignored": Sequence(
            "stale bytes accepted:",
            [
                call("start", plan=2),
                call(
                    "ask", drafter=True, picks=bytes.fromhex("000001712c01e29700fa92b600"), size=2
                ),
                call("rest", picks=bytes.fromhex("0001010305"), seconds=0.005),
                call("rest", picks=bytes.fromhex("0101000305"), seconds=0.005),
                call("drift", picks=bytes.fromhex("8002")),
            ],
        ),
        "pages of the old hold kept": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call("ask", picks=bytes.fromhex("000000000014000098"), size=2),
                call("sever", picks=bytes.fromhex("00000202020226dc0e")),
                call("stop_prefill"),
                call("drift", picks=bytes.fromhex("0002fa")),
                call("drift", picks=bytes.fromhex("000000")),
                call("drift", picks=bytes.fromhex("00000000")),
            ],
        ),
        "over before the ticket": Sequence(
            "a fence before the ticket",
            [
                call("start"),
                call("ask", picks=bytes.fromhex("00000003"), size=2),
                call("proceed", script=["H", "C", "R"]),
            ],
        ),
        "gone fails an early load": Sequence(
            "failed without a reason:",
            [
                call("start", plan=1),
                call("ask", picks=bytes.fromhex("00fe8200"), size=2),
                call("stop_prefill"),
            ],
        ),
        "the deadline counts while prefill computes": Sequence(
            "failed without a reason:",
            [
                call("start"),
                call("ask", picks=bytes.fromhex("0000000001020303"), size=2),
                call("rest", picks=bytes.fromhex("ae"), seconds=25.0),
            ],
        ),
        "the old hold not dropped": Sequence(
            "a worker still holds",
            [
                call("start", slots=2),
                call("ask", picks=bytes.fromhex("00")),
                call("stop_prefill"),
            ],
        ),
        "an abandon before the order forgotten": Sequence(
            "no rest:",
            [
                call("start"),
                call("ask", picks=bytes.fromhex("00000102"), size=2),
                call("abort_decode"),
            ],
        ),
    },
    "conversations": {
        "claimed answers are not reclaimed": Sequence(
            "no progress:",
            [
                call("start", full=(1, 0)),
            ],
        ),
        "nothing is reclaimed": Sequence(
            "no progress:",
            [
                call("start", full=(0, 1)),
            ],
        ),
        "a reclaimed hold's pages given back at once": Sequence(
            "pages given back while their hold stands",
            [
                call("start", full=(0, 1)),
            ],
        ),
        "an answer's ticket says computed": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call("ask", back="new", index=1, items=2, size=2, steps=2, works=True),
            ],
        ),
        "the abort of a load leaves its request's hold": Sequence(
            "the scheduler still holds:",
            [
                call("start"),
                call(
                    "overfill",
                    leaves=Leaves.PROMPT,
                    picks=bytes.fromhex("000000000000000000000000"),
                ),
                call("abort"),
            ],
        ),
        "the abort of a load reports its request's hold": Sequence(
            "reported sent, but not held:",
            [
                call("start"),
                call(
                    "overfill",
                    leaves=Leaves.PROMPT,
                    picks=bytes.fromhex("000000000000000000000000"),
                ),
                call("abort"),
            ],
        ),
        "a failed load ends its request's hold": Sequence(
            "never released:",
            [
                call("start"),
                call("overfill", leaves=Leaves.PROMPT),
            ],
        ),
        "received, so not sent": Sequence(
            "never released:",
            [
                call("start"),
                call("overfill", leaves=Leaves.PROMPT),
            ],
        ),
        "received counts as sent": Sequence(
            "reported sent, but not held:",
            [
                call("start"),
                call("overfill", leaves=Leaves.PROMPT),
            ],
        ),
        "a load does not wait for the device": Sequence(
            "stale bytes accepted:",
            [
                call("start"),
                call("ask", after_abort=True, back="new", picks=bytes.fromhex("00"), steps=1),
            ],
        ),
    },
}
