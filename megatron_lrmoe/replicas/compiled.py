"""The planner's solver compiled by numba: move by move what ``replicas/readable`` gives, where it is explained.

Everything is int64, so equality is exact. All of it is one file, because numba's cache does not see when a function
that another file calls has changed.
"""

import numpy as np
from numba import njit

from megatron_lrmoe.replicas.effort import FAST, FINE, SMALL_RANKS, STRONG

# Numba's cache keeps these values too: after a change of effort.py this file has to be touched. The comparison with the
# readable form fails where that was forgotten.
EFFORTS = (tuple(FAST), tuple(STRONG))
NEVER = 1 << 30
NEVER_WASTE = 1 << 62
PATIENCE = (100, 200, 400, 50)
FILL, FINISH, PART = 0, 1, 2
RECEIVER, OPTION, DONORS, FREE = 0, 1, 2, 3
"""Columns of a frame of ``_settle``."""


@njit(cache=True)
def _goes_before(a, b, balance_R, free_R, load_E, start_R, expert_E):
    if balance_R[a] != balance_R[b]:
        return balance_R[a] < balance_R[b]
    if free_R[a] != free_R[b]:
        return free_R[a] > free_R[b]
    size_a, size_b = start_R[a + 1] - start_R[a], start_R[b + 1] - start_R[b]
    for k in range(min(size_a, size_b)):
        load_a, load_b = load_E[expert_E[start_R[a] + k]], load_E[expert_E[start_R[b] + k]]
        if load_a != load_b:
            return load_a > load_b
    return size_a < size_b


@njit(cache=True)
def _canonical(load_E, owner_E, balance_R, free_R):
    """Old numbers of ranks and experts in canonical order, and where the experts of each new rank start."""
    ranks, experts = len(balance_R), len(load_E)
    start_R = np.zeros(ranks + 1, np.int64)
    for e in range(experts):
        start_R[owner_E[e] + 1] += 1
    for r in range(ranks):
        start_R[r + 1] += start_R[r]
    end_R, expert_E = start_R[:-1].copy(), np.empty(experts, np.int64)
    for e in range(experts):
        place = end_R[owner_E[e]]
        end_R[owner_E[e]] += 1
        while place > start_R[owner_E[e]] and load_E[expert_E[place - 1]] < load_E[e]:
            expert_E[place] = expert_E[place - 1]
            place -= 1
        expert_E[place] = e
    rank_R = np.empty(ranks, np.int64)
    for r in range(ranks):
        place = r
        while place > 0 and _goes_before(r, rank_R[place - 1], balance_R, free_R, load_E, start_R, expert_E):
            rank_R[place] = rank_R[place - 1]
            place -= 1
        rank_R[place] = r
    new_start_R, new_expert_E = np.zeros(ranks + 1, np.int64), np.empty(experts, np.int64)
    for new in range(ranks):
        old = rank_R[new]
        size = start_R[old + 1] - start_R[old]
        new_start_R[new + 1] = new_start_R[new] + size
        new_expert_E[new_start_R[new] : new_start_R[new + 1]] = expert_E[start_R[old] : start_R[old + 1]]
    return rank_R, new_expert_E, new_start_R


@njit(cache=True)
def _is_held(expert, rank, held_RS):
    return (held_RS[rank] == expert).any()


@njit(cache=True)
def _pick(kind, donor, receiver, room, balance_R, rows_E, start_R, held_RS):
    """Expert and rows of a move of this kind, or -1."""
    need, best = -balance_R[donor], -1
    if kind == PART:
        for e in range(start_R[donor], start_R[donor + 1]):
            if rows_E[e] > 0 and (best < 0 or rows_E[e] > rows_E[best]) and not _is_held(e, receiver, held_RS):
                best = e
        if best < 0 or rows_E[best] >= room or rows_E[best] == need:
            return -1, 0
        return best, rows_E[best]
    if kind == FINISH and need >= room:
        return -1, 0
    rows = room if kind == FILL else need
    for e in range(start_R[donor], start_R[donor + 1]):
        if rows_E[e] >= rows and (best < 0 or rows_E[e] < rows_E[best]) and not _is_held(e, receiver, held_RS):
            best = e
    return best, rows


@njit(cache=True)
def _apply(sign, expert, donor, rank, rows, overhead, balance_R, rows_E, free_R, held_RS):
    """Make a move (sign 1) or take back the last one to its rank (sign -1)."""
    balance_R[rank] -= sign * (rows + overhead)
    balance_R[donor] += sign * rows
    rows_E[expert] -= sign * rows
    if sign > 0:
        held_RS[rank, held_RS.shape[1] - free_R[rank]] = expert
        free_R[rank] -= 1
    else:
        free_R[rank] += 1
        held_RS[rank, held_RS.shape[1] - free_R[rank]] = -1


@njit(cache=True)
def _look(members, count, overhead, balance_R, free_R, donors):
    """Donors among the members (written to ``donors``), the receiver with most room, and room less need."""
    num_donors, receiver, most_room, spare = 0, -1, 0, 0
    for k in range(count):
        r = members[k]
        if balance_R[r] < 0:
            donors[num_donors] = r
            num_donors += 1
            spare += balance_R[r]
        elif free_R[r] > 0 and balance_R[r] > overhead:
            room = balance_R[r] - overhead
            spare += room
            if room > most_room:
                receiver, most_room = r, room
    return num_donors, receiver, spare


@njit(cache=True)
def _next_move(frame, donors, overhead, state, moves, num_moves):
    """Make the frame's next possible move; False if there is none left. Options are kinds x donors."""
    balance_R, rows_E, start_R, free_R, held_RS = state
    receiver, num_donors = frame[RECEIVER], frame[DONORS]
    room = balance_R[receiver] - overhead
    while frame[OPTION] < 3 * num_donors:
        kind, donor = frame[OPTION] // num_donors, donors[frame[OPTION] % num_donors]
        frame[OPTION] += 1
        expert, rows = _pick(kind, donor, receiver, room, balance_R, rows_E, start_R, held_RS)
        if expert >= 0:
            _apply(1, expert, donor, receiver, rows, overhead, balance_R, rows_E, free_R, held_RS)
            moves[num_moves, 0], moves[num_moves, 1] = expert, receiver
            moves[num_moves, 2], moves[num_moves, 3] = rows, donor
            return True
    return False


@njit(cache=True)
def _take_back(frame, overhead, state, moves, num_moves):
    """Undo what the frame did last; returns the number of moves that are left."""
    balance_R, rows_E, _, free_R, held_RS = state
    if frame[OPTION] > 3 * frame[DONORS]:
        free_R[frame[RECEIVER]] = frame[FREE]
        return num_moves
    expert, rank, rows, donor = moves[num_moves - 1]
    _apply(-1, expert, donor, rank, rows, overhead, balance_R, rows_E, free_R, held_RS)
    return num_moves - 1


@njit(cache=True)
def _settle(members, count, most, budget, overhead, state, frames, moves):
    """The depth-first search of ``readable/settle.py``, with its recursion on a stack of frames.

    (numba's cache breaks functions that call themselves.)

    Returns:
        Number of moves written to ``moves`` (expert, rank, rows, donor), or -1; and whether more moves could help.
    """
    balance_R, _, _, free_R, _ = state
    frame_N, donors_NR = frames
    depth, num_moves, met_most = 0, 0, False
    entering = True
    while depth >= 0:
        frame, donors = frame_N[depth], donors_NR[depth]
        opened = not entering
        if entering and budget > 0:
            budget -= 1
            num_donors, receiver, spare = _look(members, count, overhead, balance_R, free_R, donors)
            if num_donors == 0:
                for d in range(depth):
                    if frame_N[d, OPTION] > 3 * frame_N[d, DONORS]:
                        free_R[frame_N[d, RECEIVER]] = frame_N[d, FREE]
                return num_moves, False
            cut = num_moves + num_donors > most
            met_most = met_most or (cut and spare >= 0)
            opened = not cut and spare >= 0
            frame[RECEIVER], frame[OPTION], frame[DONORS] = receiver, 0, num_donors
        entering = False
        if opened and frame[OPTION] <= 3 * frame[DONORS]:
            if _next_move(frame, donors, overhead, state, moves, num_moves):
                num_moves += 1
            else:
                frame[OPTION] += 1
                frame[FREE], free_R[frame[RECEIVER]] = free_R[frame[RECEIVER]], 0
            entering = True
            depth += 1
            continue
        depth -= 1
        if depth >= 0:
            num_moves = _take_back(frame_N[depth], overhead, state, moves, num_moves)
    return -1, met_most or budget == 0


@njit(cache=True)
def _fewest_exports(rows, start, end, step, need):
    count = 0
    while need > 0 and start != end:
        need -= rows[start]
        start += step
        count += 1
    return count


@njit(cache=True)
def _set_bounds(balance_R, rows_E, start_R, overhead):
    ranks = len(balance_R)
    sum_S = np.zeros(1 << ranks, np.int64)
    size_S, exports_S, cost_S = sum_S.copy(), sum_S.copy(), sum_S.copy()
    for r in range(ranks):
        half = 1 << r
        exports = _fewest_exports(rows_E, start_R[r], start_R[r + 1], 1, -balance_R[r])
        for s in range(half):
            sum_S[half + s] = sum_S[s] + balance_R[r]
            size_S[half + s] = size_S[s] + 1
            exports_S[half + s] = exports_S[s] + exports
    for s in range(1, 1 << ranks):
        if sum_S[s] - overhead * (size_S[s] - 1) < 0 or (size_S[s] > 1 and exports_S[s] == 0):
            cost_S[s] = NEVER
        else:
            cost_S[s] = max(size_S[s] - 1, exports_S[s])
    return cost_S


@njit(cache=True)
def _best_partition(cost_S, total_S, choice_S):
    for ranks in range(1, len(cost_S)):
        lowest = ranks & -ranks
        rest = ranks ^ lowest
        best, best_set, others = NEVER, ranks, rest
        while True:
            one = others | lowest
            if cost_S[one] < NEVER and cost_S[one] + total_S[ranks ^ one] < best:
                best, best_set = cost_S[one] + total_S[ranks ^ one], one
            if others == 0:
                break
            others = (others - 1) & rest
        total_S[ranks], choice_S[ranks] = best, best_set
    return total_S[-1]


@njit(cache=True)
def _sets_of(choice_S, sets):
    """Number of sets of the best partition, written to ``sets``."""
    left, count = len(choice_S) - 1, 0
    while left:
        sets[count] = choice_S[left]
        left ^= choice_S[left]
        count += 1
    return count


@njit(cache=True)
def _settle_set(one, most, budget, overhead, state, frames, moves):
    """Number of moves of a set of ranks, or -1, and whether more could help; the state is left as it was."""
    balance_R, rows_E, _, free_R, held_RS = state
    members, count = np.empty(len(balance_R), np.int64), 0
    for r in range(len(balance_R)):
        if one >> r & 1:
            members[count] = r
            count += 1
    done, may_help = _settle(members, count, most, budget, overhead, state, frames, moves)
    for k in range(done - 1, -1, -1):
        expert, rank, rows, donor = moves[k]
        _apply(-1, expert, donor, rank, rows, overhead, balance_R, rows_E, free_R, held_RS)
    return done, may_help


@njit(cache=True)
def _solve_small(state, overhead, budget, tries, moves):
    """Number of moves (-1 if none were found) and the bound."""
    balance_R, rows_E, start_R, free_R, _ = state
    cost_S = _set_bounds(balance_R, rows_E, start_R, overhead)
    total_S, choice_S = np.zeros_like(cost_S), np.zeros_like(cost_S)
    first_S, count_S = np.zeros_like(cost_S), np.full_like(cost_S, -1)
    bound = _best_partition(cost_S, total_S, choice_S)
    frames, sets = _frames(free_R), np.empty(len(balance_R), np.int64)
    found, end = np.empty((free_R.sum() * (tries + 1) + 1, 4), np.int64), 0
    for _ in range(tries):
        num_sets, failed = _sets_of(choice_S, sets), False
        for one in sets[:num_sets]:
            if cost_S[one] >= NEVER:
                return -1, bound
        for one in sets[:num_sets]:
            if count_S[one] >= 0:
                continue
            done, may_help = _settle_set(one, cost_S[one], budget, overhead, state, frames, found[end:])
            if done < 0:
                cost_S[one] = cost_S[one] + 1 if may_help else NEVER
                failed = True
                break
            first_S[one], count_S[one] = end, done
            end += done
        if not failed:
            total = 0
            for one in sets[:num_sets]:
                moves[total : total + count_S[one]] = found[first_S[one] : first_S[one] + count_S[one]]
                total += count_S[one]
            return total, bound
        _best_partition(cost_S, total_S, choice_S)
    return -1, bound


@njit(cache=True)
def _frames(free_R):
    """Room for the frames of ``_settle``: a step each for every slot, every rank left out, and the end."""
    ranks = len(free_R)
    depth = free_R.sum() + ranks + 2
    return np.zeros((depth, 4), np.int64), np.empty((depth, ranks), np.int64)


@njit(cache=True)
def _two(need, room, count, chosen, waste):
    """Best pair with less waste than ``waste``, written to the first two of ``chosen``; its waste."""
    low, high = 0, count - 1
    while low < high:
        over = room[low] + room[high] - need
        if over < 0:
            low += 1
            continue
        if over < waste:
            chosen[0], chosen[1], waste = low, high, over
        high -= 1
    return waste


@njit(cache=True)
def _cover(need, room, count, allowed, chosen):
    """Number of receivers, their places in ``chosen``, and their waste (NEVER_WASTE if they do not suffice)."""
    waste, taken = NEVER_WASTE, 0
    for place in range(count):
        if room[place] >= need:
            chosen[0], waste, taken = place, room[place] - need, 1
            break
    if waste > allowed:
        waste_of_two = _two(need, room, count, chosen, waste)
        if waste_of_two < waste:
            waste, taken = waste_of_two, 2
    if waste <= allowed:
        return taken, waste
    last = count
    while last >= 3 and need > room[last - 1] + room[last - 2] + room[last - 3]:
        last -= 1
        need -= room[last]
    for top in range(last - 1, 1, -1):
        waste_of_three = _two(need - room[top], room, top, chosen, waste)
        if waste_of_three < waste:
            chosen[2], waste, taken = top, waste_of_three, 3
        if waste <= allowed // 4:
            break
    if taken == 3:
        for place in range(last, count):
            chosen[taken] = place
            taken += 1
    return taken, waste


@njit(cache=True)
def _part(order, left_out, patience, state, overhead, group_of_R, members, start_G):
    """``part`` of the readable form.

    Groups are written to ``members``, each from ``start_G``; ``group_of_R`` is -1 for donors of the pool and for
    receivers that no group uses.

    Returns:
        Number of groups and of moves (NEVER if the pool cannot settle).
    """
    balance_R = state[0]
    num_donors, num_ranks = len(order), len(balance_R)
    available, room = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    chosen = np.empty(num_ranks, np.int64)
    spare, count, groups, end, moves, need = 0, 0, 0, 0, 0, 0
    for r in range(num_ranks):
        group_of_R[r] = -1
        if r < num_donors:
            spare += balance_R[r]
        elif r >= num_donors + left_out:
            available[count], room[count] = r, max(0, balance_R[r] - overhead)
            spare += room[count]
            count += 1
    for done in range(num_donors):
        donor = num_donors - 1 - order[done]
        allowed = PATIENCE[patience] * spare // (100 * (num_donors - done))
        taken, waste = _cover(-balance_R[donor], room, count, allowed, chosen)
        if waste > allowed:
            need -= balance_R[donor]
            continue
        start_G[groups] = end
        members[end], group_of_R[donor] = donor, groups
        for k in range(taken):
            members[end + 1 + k], group_of_R[available[chosen[k]]] = available[chosen[k]], groups
        end += taken + 1
        moves += taken
        groups += 1
        spare -= waste
        kept = 0
        for k in range(count):
            if group_of_R[available[k]] < 0:
                available[kept], room[kept] = available[k], room[k]
                kept += 1
        count = kept
    start_G[groups] = end
    pooled = num_donors - groups
    if pooled > 0:
        moves += pooled - 1
    for r in range(num_ranks - 1, num_donors - 1, -1):
        if need > 0 and group_of_R[r] < 0:
            need -= max(0, balance_R[r] - overhead)
            moves += 1
    return groups, moves if need <= 0 else NEVER


@njit(cache=True)
def _settle_parting(groups, group_of_R, members, start_G, budget, most, state, overhead, frames, moves):
    """Number of moves of all groups and of the pool, or -1; the state is left as it was."""
    balance_R, rows_E, _, free_R, held_RS = state
    total, pooled = 0, np.empty(len(balance_R), np.int64)
    for g in range(groups):
        count = start_G[g + 1] - start_G[g]
        group = members[start_G[g] : start_G[g + 1]]
        done, _ = _settle(group, count, count - 1, budget, overhead, state, frames, moves[total:])
        if done >= 0:
            total += done
        else:
            for r in group:
                group_of_R[r] = -1
    count = 0
    for r in range(len(balance_R)):
        if group_of_R[r] < 0:
            pooled[count] = r
            count += 1
    done, _ = _settle(pooled, count, most - total, budget // 4, overhead, state, frames, moves[total:])
    end = total + max(done, 0)
    for k in range(end - 1, -1, -1):
        expert, rank, rows, donor = moves[k]
        _apply(-1, expert, donor, rank, rows, overhead, balance_R, rows_E, free_R, held_RS)
    return end if done >= 0 else -1


@njit(cache=True)
def _draw(random, below):
    return np.int64(random >> np.uint64(33)) % below


@njit(cache=True)
def _step(random):
    return random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)


@njit(cache=True)
def _bound_large(state, num_donors, overhead):
    balance_R, rows_E, start_R, _, _ = state
    given, need = 0, 0
    for r in range(num_donors):
        given += _fewest_exports(rows_E, start_R[r], start_R[r + 1], 1, -balance_R[r])
        need -= balance_R[r]
    room_R = np.maximum(balance_R - overhead, 0)
    return max(given, _fewest_exports(room_R, len(room_R) - 1, num_donors - 1, -1, need))


@njit(cache=True)
def _most_left_out(balance_R, num_donors, overhead):
    """Smallest receivers that can be left out while the rest has room for all that donors give."""
    spare, count = 0, 0
    for r in range(len(balance_R)):
        spare += balance_R[r] if r < num_donors else max(0, balance_R[r] - overhead)
    while num_donors + count < len(balance_R):
        spare -= max(0, balance_R[num_donors + count] - overhead)
        if spare < 0:
            break
        count += 1
    return count


@njit(cache=True)
def _next_choice(order, left_out, patience, most_left_out, random):
    """Swap donors in ``order``; new number of receivers left out, patience, and state of the generator."""
    random = _step(random)
    for _ in range(1 + _draw(random, 2)):
        random = _step(random)
        a = _draw(random, len(order))
        random = _step(random)
        b = _draw(random, len(order))
        order[a], order[b] = order[b], order[a]
    random = _step(random)
    what = _draw(random, 5)
    if what == 0:
        random = _step(random)
        patience = _draw(random, len(PATIENCE))
    elif what == 1:
        random = _step(random)
        left_out = max(0, most_left_out - _draw(random, 4))
    return left_out, patience, random


@njit(cache=True)
def _solve_large(state, overhead, budget, attempts, moves):
    """Number of moves (-1 if none were found) and the bound."""
    balance_R, num_donors = state[0], (state[0] < 0).sum()
    ranks, bound = len(balance_R), _bound_large(state, num_donors, overhead)
    most_left_out = _most_left_out(balance_R, num_donors, overhead)
    frames, found = _frames(state[3]), np.empty_like(moves)
    group_of_R, members, start_G = np.empty(ranks, np.int64), np.empty(ranks, np.int64), np.empty(ranks + 1, np.int64)
    order, new = np.arange(num_donors), np.arange(num_donors)
    left_out, patience, level, best, random = most_left_out, 0, NEVER, -1, np.uint64(1)
    for attempt in range(attempts):
        new_left_out, new_patience = most_left_out - attempt // 2, attempt % 2
        if attempt < 6 and new_left_out >= 0:
            new[:] = np.arange(num_donors)
        else:
            new[:] = order
            new_left_out, new_patience, random = _next_choice(new, left_out, patience, most_left_out, random)
        groups, count = _part(new, new_left_out, new_patience, state, overhead, group_of_R, members, start_G)
        if count == NEVER or count > level:
            continue
        order[:] = new
        left_out, patience, level = new_left_out, new_patience, count
        if best < 0 or count < best:
            most = NEVER if best < 0 else best - 1
            done = _settle_parting(groups, group_of_R, members, start_G, budget, most, state, overhead, frames, found)
            if done >= 0:
                best = done
                moves[:best] = found[:best]
        if best == bound:
            break
    return best, bound


@njit(cache=True)
def _held_table(held_N2, free_R, rank_R, expert_E):
    """(R, slots) experts in slots, in canonical numbers and order, -1 for free ones at the end of each row."""
    new_R, new_E = np.empty_like(rank_R), np.empty_like(expert_E)
    for new in range(len(rank_R)):
        new_R[rank_R[new]] = new
    for new in range(len(expert_E)):
        new_E[expert_E[new]] = new
    width_R = free_R.copy()
    for k in range(len(held_N2)):
        width_R[new_R[held_N2[k, 1]]] += 1
    held_RS = np.full((len(rank_R), max(1, width_R.max())), -1, np.int64)
    for k in range(len(held_N2)):
        rank = new_R[held_N2[k, 1]]
        width_R[rank] -= 1
        held_RS[rank, width_R[rank] - free_R[rank]] = new_E[held_N2[k, 0]]
    return held_RS


@njit(cache=True)
def _solve_once(load_E, owner_E, balance_R, free_R, held_N2, overhead, budget, tries, attempts, moves):
    """Number of moves, in the caller's numbers, and the bound; -1 if none were found."""
    if balance_R.min() >= 0:
        return 0, 0
    if balance_R.sum() < 0:
        return -1, NEVER
    rank_R, expert_E, start_R = _canonical(load_E, owner_E, balance_R, free_R)
    held_RS = _held_table(held_N2, free_R[rank_R], rank_R, expert_E)
    state = (balance_R[rank_R], load_E[expert_E], start_R, free_R[rank_R], held_RS)
    if len(balance_R) <= SMALL_RANKS:
        count, bound = _solve_small(state, overhead, budget, tries, moves)
    else:
        count, bound = _solve_large(state, overhead, budget, attempts, moves)
    for k in range(count):
        moves[k, 0], moves[k, 1] = expert_E[moves[k, 0]], rank_R[moves[k, 1]]
    return count, bound


@njit(cache=True)
def _within(load_E, owner_E, balance_R, free_R, held_N2, overhead, strong, moves):
    """Fewest moves over all numbers of slots up to the given ones, or -1; and the bound."""
    best, bound, trial, slots = -1, 0, np.empty_like(moves), free_R.max()
    failed_s = np.ones(slots + 1, np.bool_)
    failed_s[0] = slots == 0
    for effort in range(1 if strong else 0, 2):
        budget, tries, attempts = EFFORTS[effort]
        for s in range(slots + 1):
            if not failed_s[s]:
                continue
            free = np.minimum(free_R, s)
            count, bound = _solve_once(
                load_E, owner_E, balance_R, free, held_N2, overhead, budget, tries, attempts, trial
            )
            if count >= 0:
                failed_s[s] = False
                if best < 0 or count < best:
                    best = count
                    moves[:best] = trial[:best]
            if best >= 0 and (best == bound or len(balance_R) > SMALL_RANKS):
                return best, bound
    return best, bound


@njit(cache=True)
def _sort_moves(moves, count):
    """By (expert, rank): the order in which they were found means nothing."""
    for k in range(1, count):
        move, place = moves[k].copy(), k
        while place > 0 and (
            moves[place - 1, 0] > move[0] or (moves[place - 1, 0] == move[0] and moves[place - 1, 1] > move[1])
        ):
            moves[place] = moves[place - 1]
            place -= 1
        moves[place] = move


@njit(cache=True)
def solve(load_E, owner_E, balance_R, free_R, held_N2, overhead, strong):
    """``solve`` of ``readable/search.py`` on int64 arrays; ``held_N2`` is (n, 2).

    Returns:
        (n, 3) moves by (expert, rank): expert, rank, rows; how far the balances were raised; and the bound.
    """
    moves = np.empty((free_R.sum() + 1, 4), np.int64)
    count, bound = _within(load_E, owner_E, balance_R, free_R, held_N2, overhead, strong, moves)
    high = 0
    if count < 0:
        trial = np.empty_like(moves)
        low, high, count, bound = 0, -balance_R.min(), 0, 0
        resolution = max(1, load_E.sum() // len(balance_R) // FINE)
        while free_R.max() > 0 and high - low > resolution:
            middle = (low + high) // 2
            done, done_bound = _within(load_E, owner_E, balance_R + middle, free_R, held_N2, overhead, True, trial)
            if done < 0:
                low = middle
            else:
                count, bound, high = done, done_bound, middle
                moves[:count] = trial[:count]
    _sort_moves(moves, count)
    return moves[:count, :3].copy(), high, bound
