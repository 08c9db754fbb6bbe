"""The versions of the policies that had dialogs."""

from fusedrl.collectors.policy_version import PolicyVersion

__all__ = ["PolicyVersion"]
