# SPDX-License-Identifier: Apache-2.0
"""The paper as data: what it reports, and what each of its tables and figures is made of."""
