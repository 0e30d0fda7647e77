"""Which pages the running requests' contexts lie in, on the host and on the device. Filled by
plans; allocates nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import StepPlan
from engine.staging import Staging


class PageTables:
    """One row a request, by its req_index, and a last row of dummy pages, which is padding's."""

    def __init__(self, max_running: int, max_pages: int, device: torch.device) -> None:
        self._host = np.zeros((max_running + 1, max_pages), dtype=np.int32)
        # [max_running + 1, max_pages] int32; on a CPU the host's own memory
        self.table = torch.from_numpy(self._host)
        self._is_apart = device.type != "cpu"
        if self._is_apart:
            self.table = torch.zeros_like(self.table, device=device)

    @property
    def padding(self) -> int:
        """The row of dummy pages."""
        return len(self._host) - 1

    def update(self, plan: StepPlan, staging: Staging) -> None:
        """New requests' rows are cleared, then the extends' new pages are put in."""
        places: list[npt.NDArray[np.int64]] = []
        width = self._host.shape[1]
        for start in plan.starts:
            if self._host[start.req_index].any():
                self._host[start.req_index] = 0
                places.append(start.req_index * width + np.arange(width))
        for extend in plan.extends:
            if extend.pages:
                begin, end = extend.page_start, extend.page_start + len(extend.pages)
                self._host[extend.req_index, begin:end] = extend.pages
                places.append(extend.req_index * width + np.arange(begin, end))
        if places and self._is_apart:
            changed = np.unique(np.concatenate(places))
            where, pages = staging.send(changed, self._host.reshape(-1)[changed])
            self.table.view(-1).index_copy_(0, where, pages)

    def locs(
        self,
        req_indices: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        page_size: int,
    ) -> npt.NDArray[np.int64]:
        """Where the tokens at these positions of these requests lie; all three [T]."""
        pages = self._host[req_indices, positions // page_size].astype(np.int64)
        return pages * page_size + positions % page_size

    def have(
        self,
        req_indices: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        page_size: int,
    ) -> bool:
        """Whether there is a page for each of these positions of these requests; both [T]."""
        columns = positions // page_size
        if columns.max() >= self._host.shape[1]:
            return False
        return bool(self._host[req_indices, columns].all())
