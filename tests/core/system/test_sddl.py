"""Security descriptors of Windows as text."""

from __future__ import annotations

import pytest

from llamasup.core.system.native.sddl import owner_of, users_with_rights

EVE = "S-1-5-21-1-2-3-1001"


@pytest.mark.parametrize(
    ("sddl", "owner", "users"),
    [
        (f"O:{EVE}D:P(A;OICI;FA;;;SY)(A;OICI;FA;;;{EVE})", EVE, {"SY", EVE}),
        ("O:BAG:SYD:PAI(A;;FA;;;BA)", "BA", {"BA"}),
        ("O:LAD:(A;;FA;;;LA)", "LA", {"LA"}),
        ("D:(D;;FA;;;WD)(A;;FA;;;SY)", "", {"SY"}),
        ("D:(D;;FA;;;WD)", "", set()),
        # With a condition, and for one kind of object: they give rights, too.
        ('D:(XA;;FX;;;WD;(@User.Title=="PM" && (Member_of {SID(BA)})))(A;;FA;;;SY)', "", {"WD", "SY"}),
        ("D:(OA;;CR;00000000-0000-0000-0000-000000000000;;AU)", "", {"AU"}),
        # No list at all.
        ("O:BAD:NO_ACCESS_CONTROL", "BA", {"WD"}),
        ("O:BA", "BA", {"WD"}),
        ("", "", {"WD"}),
    ],
)
def test_owner_and_users_with_rights(sddl: str, owner: str, users: set[str]) -> None:
    assert owner_of(sddl) == owner
    assert users_with_rights(sddl) == users
