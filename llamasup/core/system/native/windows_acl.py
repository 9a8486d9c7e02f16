"""Owners and access control lists of folders on Windows."""

from __future__ import annotations

import sys

assert sys.platform == "win32"

import ctypes
from ctypes import wintypes
from pathlib import Path
from typing import Any

from llamasup.core.system.native.sddl import owner_of, users_with_rights

# winnt.h, accctrl.h
_PERSISTENT_ACLS = 0x0008
_TOKEN_QUERY, _TOKEN_USER = 0x0008, 1
_SE_FILE_OBJECT, _OWNER, _DACL, _PROTECTED_DACL = 1, 0x1, 0x4, 0x80000000
# In SDDL: the administrators and the system, which can take any file over; the owner, who is also checked.
_TRUSTED = frozenset({"BA", "SY"})
_OWNER_RIGHTS = "OW"

_kernel32: Any = ctypes.WinDLL("kernel32", use_last_error=True)
_advapi32: Any = ctypes.WinDLL("advapi32", use_last_error=True)

_kernel32.CloseHandle.argtypes = (ctypes.c_void_p,)
_kernel32.GetCurrentProcess.restype = ctypes.c_void_p
_kernel32.LocalFree.argtypes = (ctypes.c_void_p,)
_kernel32.GetVolumePathNameW.argtypes = (wintypes.LPCWSTR, wintypes.LPWSTR, wintypes.DWORD)
_kernel32.GetVolumeInformationW.argtypes = (
    *(wintypes.LPCWSTR, wintypes.LPWSTR, wintypes.DWORD, ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.POINTER(wintypes.DWORD), wintypes.LPWSTR, wintypes.DWORD),
)
_advapi32.OpenProcessToken.argtypes = (ctypes.c_void_p, wintypes.DWORD, ctypes.c_void_p)
_advapi32.GetTokenInformation.argtypes = (
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, wintypes.DWORD, ctypes.c_void_p),
)
_advapi32.ConvertSidToStringSidW.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_advapi32.ConvertStringSecurityDescriptorToSecurityDescriptorW.argtypes = (
    *(wintypes.LPCWSTR, wintypes.DWORD, ctypes.c_void_p, ctypes.c_void_p),
)
_advapi32.ConvertSecurityDescriptorToStringSecurityDescriptorW.argtypes = (
    *(ctypes.c_void_p, wintypes.DWORD, wintypes.DWORD, ctypes.c_void_p, ctypes.c_void_p),
)
_advapi32.GetSecurityDescriptorDacl.argtypes = (ctypes.c_void_p,) * 4
_advapi32.GetNamedSecurityInfoW.argtypes = (
    *(wintypes.LPCWSTR, ctypes.c_int, wintypes.DWORD),
    *(ctypes.c_void_p,) * 5,
)
_advapi32.SetNamedSecurityInfoW.argtypes = (
    *(wintypes.LPWSTR, ctypes.c_int, wintypes.DWORD),
    *(ctypes.c_void_p,) * 4,
)
_advapi32.SetFileSecurityW.argtypes = (wintypes.LPCWSTR, wintypes.DWORD, ctypes.c_void_p)


def is_own(folder: Path) -> bool:
    """Return whether the folder belongs to this user, the administrators or the system."""
    user = _user_sid()
    return owner_of(_sddl_of(folder)) in {*_TRUSTED, user, _in_sddl(user)}


def make_private(path: Path) -> str:
    """Set an ACL for the user, the administrators and the system, as Python 3.12.4 gives new folders."""
    user = _user_sid()
    own = {user, _in_sddl(user)}
    sddl = _sddl_of(path)
    if (owner := owner_of(sddl)) not in _TRUSTED | own:
        return f"it belongs to another user ({owner})"
    allowed = {_OWNER_RIGHTS, *_TRUSTED, *own}
    if users_with_rights(sddl) <= allowed:
        return ""
    if not _volume_flags(path) & _PERSISTENT_ACLS:
        return "its drive has no ACLs, so other users could read the keys in it"
    entries = "".join(f"(A;OICI;FA;;;{each})" for each in (*sorted(_TRUSTED), user))
    _set_acl(path, f"D:P{entries}")
    others = users_with_rights(_sddl_of(path)) - allowed
    return f"the ACL still gives rights to {', '.join(sorted(others))}" if others else ""


def _check(succeeded: int) -> None:
    if not succeeded:
        raise ctypes.WinError(ctypes.get_last_error())


def _user_sid() -> str:
    token, text, size = ctypes.c_void_p(), wintypes.LPWSTR(), wintypes.DWORD()
    _check(_advapi32.OpenProcessToken(_kernel32.GetCurrentProcess(), _TOKEN_QUERY, ctypes.byref(token)))
    try:
        buffer = ctypes.create_string_buffer(256)  # TOKEN_USER: a pointer to the SID, and the SID
        _check(_advapi32.GetTokenInformation(token, _TOKEN_USER, buffer, len(buffer), ctypes.byref(size)))
        sid = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_void_p))[0]
        _check(_advapi32.ConvertSidToStringSidW(sid, ctypes.byref(text)))
        try:
            return str(text.value)
        finally:
            _kernel32.LocalFree(text)
    finally:
        _kernel32.CloseHandle(token)


def _sddl_of(path: Path) -> str:
    """The owner and the ACL of ``path``, as text."""
    descriptor = ctypes.c_void_p()
    failed = _advapi32.GetNamedSecurityInfoW(
        str(path), _SE_FILE_OBJECT, _OWNER | _DACL, None, None, None, None, ctypes.byref(descriptor)
    )
    if failed:
        raise ctypes.WinError(failed)
    try:
        return _text_of(descriptor, _OWNER | _DACL)
    finally:
        _kernel32.LocalFree(descriptor)


def _in_sddl(sid: str) -> str:
    """Return ``sid`` as Windows writes it in SDDL: LA for the Administrator, LS and NS for services."""
    descriptor = ctypes.c_void_p()
    to_descriptor = _advapi32.ConvertStringSecurityDescriptorToSecurityDescriptorW
    _check(to_descriptor(f"O:{sid}", 1, ctypes.byref(descriptor), None))
    try:
        return owner_of(_text_of(descriptor, _OWNER))
    finally:
        _kernel32.LocalFree(descriptor)


def _text_of(descriptor: ctypes.c_void_p, parts: int) -> str:
    text = wintypes.LPWSTR()
    to_text = _advapi32.ConvertSecurityDescriptorToStringSecurityDescriptorW
    _check(to_text(descriptor, 1, parts, ctypes.byref(text), None))
    try:
        return str(text.value)
    finally:
        _kernel32.LocalFree(text)


def _set_acl(path: Path, sddl: str) -> None:
    descriptor, acl = ctypes.c_void_p(), ctypes.c_void_p()
    present, defaulted = wintypes.BOOL(), wintypes.BOOL()
    to_descriptor = _advapi32.ConvertStringSecurityDescriptorToSecurityDescriptorW
    _check(to_descriptor(sddl, 1, ctypes.byref(descriptor), None))
    try:
        _advapi32.GetSecurityDescriptorDacl(
            descriptor, ctypes.byref(present), ctypes.byref(acl), ctypes.byref(defaulted)
        )
        failed = _advapi32.SetNamedSecurityInfoW(
            str(path), _SE_FILE_OBJECT, _DACL | _PROTECTED_DACL, None, None, acl, None
        )
        if failed:
            raise ctypes.WinError(failed)
        # That also changed the ACLs in the folder, but lets Wine keep the rights of others.
        _check(_advapi32.SetFileSecurityW(str(path), _DACL, descriptor))
    finally:
        _kernel32.LocalFree(descriptor)


def _volume_flags(path: Path) -> int:
    volume = ctypes.create_unicode_buffer(32_768)
    flags = wintypes.DWORD()
    if not _kernel32.GetVolumePathNameW(str(path), volume, len(volume)):
        return 0
    if not _kernel32.GetVolumeInformationW(volume, None, 0, None, None, ctypes.byref(flags), None, 0):
        return 0
    return flags.value
