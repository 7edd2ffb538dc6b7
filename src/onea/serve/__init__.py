# SPDX-License-Identifier: Apache-2.0
"""A model behind HTTP: predict, teach, undo, and a page for people. Needs the extra ``onea[serve]``."""
