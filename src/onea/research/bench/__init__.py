# SPDX-License-Identifier: Apache-2.0
"""How fast this machine learns and answers, next to plain baselines measured in the same run."""
