"""Options of DeepSpeed-Chat's scripts and their counterparts, from a table in the documentation.

The table lists options of DeepSpeed-Chat's `main.py` scripts, including step 2 with DPO, that are
named differently here. They are refused with a message that names the counterpart.
"""

import re

from pipeline.system.installation import ROOT

PAGE = ROOT / "docs" / "deepspeed_chat.md"


def deepspeed_chat_hint(name: str) -> str | None:
    """Return the end of a message about a DeepSpeed-Chat option, or None for other names."""
    row = rf"^\| `--{re.escape(name.replace('-', '_'))}` \| (.+) \|$"
    match = re.search(row, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        return None
    relation = "is" if match[1].startswith("not needed") else "corresponds to"
    return f"DeepSpeed-Chat's option {relation} {match[1]}"
