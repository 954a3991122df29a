"""Options of DeepSpeed-Chat's scripts and their counterparts, from a table in the documentation.

The options are those of its steps' `main.py`, including step 2 by DPO, that have another name here.
They are refused with a message that names the counterpart.
"""

import re

from pipeline.system.installation import ROOT

PAGE = ROOT / "docs" / "deepspeed_chat.md"


def deepspeed_chat_hint(name: str) -> str | None:
    """The end of a message on an option of DeepSpeed-Chat; None if it has no such option."""
    row = rf"^\| `--{re.escape(name.replace('-', '_'))}` \| (.+) \|$"
    match = re.search(row, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        return None
    relation = "is" if match[1].startswith("not needed") else "corresponds to"
    return f"DeepSpeed-Chat's option {relation} {match[1]}"
