# SPDX-License-Identifier: Apache-2.0
"""The paper as data: its reported numbers, and the runs behind each table and figure."""
