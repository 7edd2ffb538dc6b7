# SPDX-License-Identifier: Apache-2.0
"""Runs of a method on a stream with a seed; each run writes a record and can be resumed if its process is killed."""
